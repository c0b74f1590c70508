"""A GPU's manners on a CPU: a real model whose steps are computed in a thread, launched before the last tokens are known.

Rows whose token the host does not know yet take what their slot sampled in the step before, as on a device.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

from baton.kvpool.base import Pool
from baton.protocol.progress import ProgressWord
from baton.worker.executors.base import Executor, LoadedExecutor, Sampled
from baton.worker.flat_batch import FEEDBACK, FlatBatch, Spans
from baton.worker.input_batch import InputBatch
from baton.worker.sampling_batch import SamplingBatch


def running_ahead(loaded: LoadedExecutor) -> LoadedExecutor:
    def with_pool(pool: Pool) -> AheadExecutor:
        return AheadExecutor(loaded.with_pool(pool))

    return LoadedExecutor(loaded.kv, with_pool)


class Ahead:
    def __init__(self, future: Future[Sampled]) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


class AheadExecutor:
    steps_ahead = 2
    samples_on_host = True

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.name, self.arithmetic, self.config = inner.name, inner.arithmetic, inner.config
        self.draft_rows_max, self.row_cost = inner.draft_rows_max, inner.row_cost
        self.fed_back = 0
        "Rows so far whose token the host did not know."
        self._device = ThreadPoolExecutor(1, "device")
        self._last: dict[int, int] = {}

    def prepare(self) -> None:
        pass

    def send_tables(self, sequences: InputBatch) -> None:
        pass

    def launch(self, batch: FlatBatch, sampling: SamplingBatch) -> Ahead:
        future = self._device.submit(self._compute, _copied(batch), _settled(sampling))
        if sampling.on_host or batch.drafts is not None:
            future.exception()  # its tokens are chosen here, before anything is launched after it
        return Ahead(future)

    def collect(self, launched: Any) -> Sampled:
        return launched.future.result()

    def report_progress(self, word: ProgressWord) -> None:
        self.inner.report_progress(word)

    def close(self) -> None:
        self._device.shutdown()
        self.inner.close()

    def _compute(self, batch: FlatBatch, sampling: Any) -> Sampled:
        for row in np.flatnonzero(batch.token_ids == FEEDBACK).tolist():
            self.fed_back += 1
            batch.token_ids[row] = self._last[int(batch.feedback_slots[row])]
        sampled = self.inner.collect(self.inner.launch(batch, sampling))
        for place in np.flatnonzero(batch.due).tolist():
            self._last[int(batch.spans.slots[place])] = int(sampled.tokens[place])
        return sampled


def _copied(batch: FlatBatch) -> FlatBatch:
    """The runner's arrays are its own again when launch returns."""
    spans = batch.spans
    copied = Spans(spans.tables.copy(), spans.slots.copy(), spans.starts.copy(), spans.contexts.copy())
    return FlatBatch(copied, batch.token_ids.copy(), batch.positions.copy(), batch.due.copy(), batch.drafted)


def _settled(sampling: SamplingBatch) -> Any:
    """So are the slots: what a draw depends on is looked up now. Who is sampled on the host is computed at once."""
    draws = dict(zip(sampling.slots.tolist(), sampling.draws_of(sampling.slots), strict=True))
    names = (
        "constrained",
        "slots",
        "states",
        "plain",
        "excludes",
        "excludes_beside_grammars",
        "asks_prompts",
        "pools",
        "on_host",
        "draws",
        "sequences",
        "columns",
    )

    def draws_of(slots: Any, ahead: int = 0) -> Any:
        if ahead:  # behind a draft: nothing is launched before this step is collected
            return sampling.draws_of(slots, ahead)
        return np.array([draws[slot] for slot in slots.tolist()], sampling.columns.draws.dtype)

    return SimpleNamespace(
        **{name: getattr(sampling, name) for name in names}, draws_of=draws_of, prompt_parts=sampling.prompt_parts
    )
