"""Passes of a draft model: round 1 computes known tokens of several sequences, every later round the draft before it.

    round 1    tokens that its pool lacks, and the last one     d1       one pass for all sequences; prompts in parts
    round 2    d1                                               d2       one row for each sequence
    round k    d(k-1)                                           dk

On a CPU a round ends before the next one begins (ForwardPasses). On a GPU the rounds are launched one after another, each reads
its tokens on the device, and the host waits for the last one (../cuda/draft_passes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np

from baton.protocol.progress import ProgressWord
from baton.worker.arrays import Int32s, Int64s
from baton.worker.flat_batch import FlatBatch, Spans
from baton.worker.forward.base import Forward

UNBOUNDED = 1 << 20

Passed = Callable[[int, float], None]
"""Receives the rows and the seconds of a pass."""


class DraftPasses(Protocol):
    """A draft model with its weights, bound to its pool."""

    vocabulary: int
    "Width of its embedding and of its head."
    context_tokens: int
    "Maximum of positions."
    rows_max: int
    "Maximum of rows in round 1."

    def prepare(self) -> None:
        """Does everything that would slow down the first draft."""
        ...

    def run(self, flat: FlatBatch, wanted: Int64s, passed: Passed, meanwhile: Callable[[], None]) -> list[list[int]]:
        """The drafts of each sequence: one per round, or fewer if a round fails. `flat`: round 1, in which sequences that get
        drafts are due. `wanted`: [sequences] rounds, 0 for a sequence that is not due. `meanwhile`: called once,
        before the host computes, or waits for a device that does. A failed round gives an error code below 0; what follows it
        is undefined. All tokens but the last of a sequence are in the pool."""
        ...

    def report_progress(self, word: ProgressWord) -> None:
        """Sets the word to advance from now on, at least once per pass."""
        ...

    def close(self) -> None:
        """Releases the pool: nothing can be computed afterwards."""
        ...


class ForwardPasses:
    """Passes by a forward pass on the host."""

    rows_max = UNBOUNDED

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.vocabulary, self.context_tokens = forward.config.vocab_size, forward.config.context_tokens_max

    def prepare(self) -> None:
        pass

    def run(self, flat: FlatBatch, wanted: Int64s, passed: Passed, meanwhile: Callable[[], None]) -> list[list[int]]:
        meanwhile()
        found: list[list[int]] = [[] for _ in range(len(wanted))]
        places: list[int] = np.flatnonzero(wanted).tolist()
        self._append(found, places, self._pass(flat, flat.last_rows[places], passed))
        ends = flat.spans.contexts + np.diff(flat.spans.starts)
        while places := [place for place in places if found[place][-1] >= 0 and len(found[place]) < wanted[place]]:
            positions = ends[places] + np.array([len(found[place]) - 1 for place in places], np.int64)
            ids = np.array([found[place][-1] for place in places], np.int32)
            rows = single_rows(flat.spans, places, positions, ids)
            self._append(found, places, self._pass(rows, np.arange(len(ids)), passed))
        return found

    def report_progress(self, word: ProgressWord) -> None:
        self._forward.report_progress(word)

    def close(self) -> None:
        self._forward.close()

    def _pass(self, flat: FlatBatch, rows: Int64s, passed: Passed) -> list[int]:
        """The likeliest token behind each of these rows."""
        began = perf_counter()
        hidden = self._forward.hidden(flat)
        tokens: list[int] = self._forward.likeliest(hidden[rows]).tolist() if rows.size else []
        passed(len(flat.token_ids), perf_counter() - began)
        return tokens

    def _append(self, found: list[list[int]], places: Sequence[int], tokens: list[int]) -> None:
        for place, token in zip(places, tokens, strict=True):
            found[place].append(token)


def single_rows(spans: Spans, places: Sequence[int], positions: Int64s, ids: Int32s) -> FlatBatch:
    """A step with one row for each of these places of another one."""
    count = len(places)
    own = Spans(spans.tables, spans.slots[list(places)], np.arange(count + 1), positions)
    return FlatBatch(own, ids, positions, np.ones(count, np.bool_))
