"""Passes of a draft model on the GPU: all rounds of a proposal are launched before the host waits for the last one.

host      launch 1 | launch 2 | launch 3 | launch 4 |             wait | drafts of the main model's next step
device            |---- round 1 ----|- round 2 -|- round 3 -|- round 4 -|

Round 1 is a step with prompts or a decode step, as of any model. Later rounds are decode steps whose rows are FEEDBACK: the
token of the round before never leaves the device. Tokens are greedy, so nothing but the likeliest one is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

import numpy as np
import torch

from baton.protocol.progress import ProgressWord
from baton.worker.arrays import Int32s, Int64s
from baton.worker.cuda.decoder_step import DecoderStep
from baton.worker.cuda.graphs import BUCKETS, RING, GraphLaunch
from baton.worker.cuda.step_inputs import StepBatch, split_few_rows
from baton.worker.drafters.passes import Passed
from baton.worker.drafters.price import ROWS_MAX as DRAFTS_MAX
from baton.worker.flat_batch import FEEDBACK, FlatBatch

GREEDY_BUCKETS = tuple(bucket for bucket in BUCKETS if bucket <= DRAFTS_MAX)
"""Sizes of recorded rounds: no more sequences have drafts."""
UNREAD_MAX = RING - 1
"""Maximum of launched rounds whose tokens are not read: the buffer of the one before is needed to time the next."""


class DraftSteps(Protocol):
    """DeviceSteps (graphs.py), or the interpreted steps of tests."""

    step: DecoderStep

    def prepare(self) -> None: ...

    def launch(self, batch: StepBatch) -> GraphLaunch: ...

    def write_tables(self, slots: Int64s, places: Int64s, blocks: Int64s) -> None: ...

    def close(self) -> None: ...


class CudaDraftPasses:
    def __init__(self, steps: DraftSteps) -> None:
        """`steps`: timed ones."""
        self._steps = steps
        limits = steps.step.limits
        self.vocabulary, self.context_tokens = steps.step.config.vocab_size, limits.context_tokens
        self.rows_max = limits.rows
        self._block_size = steps.step.pool.shape[4]
        self._tables: Int32s = np.zeros(tuple(steps.step.tables.shape), np.int32)
        "The block tables on the device."
        self._advance: Callable[[], None] = lambda: None

    @torch.inference_mode()
    def prepare(self) -> None:
        self._steps.prepare()

    @torch.inference_mode()
    def run(self, flat: FlatBatch, wanted: Int64s, passed: Passed, meanwhile: Callable[[], None]) -> list[list[int]]:
        ends = flat.spans.contexts + np.diff(flat.spans.starts)
        self._write_tables(flat, ends + wanted)
        reader = _RoundReader(len(wanted), passed, self._advance, meanwhile)
        reader.add(self._steps.launch(self._first(flat)), np.flatnonzero(wanted), len(flat.token_ids))
        for done in range(1, int(wanted.max(initial=0))):
            places = np.flatnonzero(wanted > done)
            launched = self._steps.launch(_later(flat.spans.slots[places], ends[places] + done - 1))
            reader.add(launched, places, len(places))
        return reader.finish()

    def report_progress(self, word: ProgressWord) -> None:
        self._advance = word.advance

    def close(self) -> None:
        self._steps.close()
        del self._steps

    def _first(self, flat: FlatBatch) -> StepBatch:
        spans, counts = flat.spans, np.diff(flat.spans.starts)
        return StepBatch(
            *(flat.token_ids, spans.slots, spans.starts, spans.contexts, flat.due),
            outputs=np.zeros(len(counts), np.int32),
            draws=False,
            of_prompt=split_few_rows(counts, spans.contexts, self._steps.step.limits.sequences),
        )

    def _write_tables(self, flat: FlatBatch, ends: Int64s) -> None:
        """Writes the table entries of these sequences that differ from those on the device. `ends`: their lengths with all
        drafts. The main model's executor has a copy of its own, which is written later."""
        slots, held = flat.spans.slots, -(-ends // self._block_size)
        width = min(int(held.max()), self._tables.shape[1], flat.spans.tables.shape[1])
        given, known = flat.spans.tables[slots, :width], self._tables[slots, :width]
        rows, places = np.nonzero((given != known) & (np.arange(width) < held[:, None]))
        if rows.size:
            self._tables[slots[rows], places] = given[rows, places]
            self._steps.write_tables(slots[rows], places, given[rows, places].astype(np.int64))


class _RoundReader:
    """Reads the tokens of launched rounds, at the latest before their buffers are used again."""

    def __init__(self, sequences: int, passed: Passed, advance: Callable[[], None], meanwhile: Callable[[], None]) -> None:
        """`meanwhile`: called before the first wait."""
        self._found: list[list[int]] = [[] for _ in range(sequences)]
        self._passed, self._advance, self._meanwhile = passed, advance, meanwhile
        self._unread: deque[tuple[GraphLaunch, list[int], int]] = deque()
        self._last: GraphLaunch | None = None
        "The round that was read last."
        self._rows, self._began, self._later = 0, perf_counter(), 0.0
        "Rows of round 1; time of its launch; seconds of the later rounds."

    def add(self, launched: GraphLaunch, places: Int64s, rows: int) -> None:
        """`places`: the sequences that get a token."""
        self._advance()
        self._rows = self._rows or rows
        self._unread.append((launched, places.tolist(), rows))
        if len(self._unread) == UNREAD_MAX:
            self._read()

    def finish(self) -> list[list[int]]:
        while self._unread:
            self._read()
        self._passed(self._rows, max(0.0, perf_counter() - self._began - self._later))
        return self._found

    def _read(self) -> None:
        if self._last is None:
            self._meanwhile()
        launched, places, rows = self._unread.popleft()
        launched.done.synchronize()
        self._advance()
        for place, token in zip(places, launched.tokens.tolist(), strict=True):
            self._found[place].append(token)
        if self._last is not None:
            seconds = self._last.done.elapsed_time(launched.done) / 1e3
            self._passed(rows, seconds)
            self._later += seconds
        self._last = launched


def _later(slots: Int64s, positions: Int64s) -> StepBatch:
    """A round behind another one: a row per sequence, whose token is that of the round before."""
    count = len(slots)
    return StepBatch(
        *(np.full(count, FEEDBACK, np.int32), slots, np.arange(count + 1), positions, np.ones(count, np.bool_)),
        outputs=np.zeros(count, np.int32),
        draws=False,
    )
