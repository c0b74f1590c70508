"""An executor like a GPU's: launch returns at once, steps are done when the test says so, tokens are fed back on the "device".

The next token of a sequence is a function of all its tokens: hash -> hash * 31 + token. So whoever runs a wrong token, or
another slot's, answers wrong tokens from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Event

import numpy as np
from rig import TINY

from baton.protocol.progress import ProgressWord
from baton.worker.executors.base import Sampled
from baton.worker.failure import Failure
from baton.worker.flat_batch import FEEDBACK, FlatBatch
from baton.worker.input_batch import InputBatch
from baton.worker.sampling_batch import SamplingBatch

DEADLINE_SECONDS = 20.0


def expected(tokens: list[int], count: int) -> list[int]:
    """What a sequence of these tokens answers."""
    state, answers = 0, []
    for token in tokens:
        state = (state * 31 + token + 1) % 99991
    for _ in range(count):
        answers.append(state % TINY.vocab_size)
        state = (state * 31 + answers[-1] + 1) % 99991
    return answers


class Late:
    def __init__(self, sampled: Sampled, fed_back: list[int], on_wait: Callable[[], None] | None) -> None:
        self.sampled = sampled
        self.on_wait = on_wait
        self.fed_back = fed_back
        "Slots whose token the host did not know."
        self.done = Event()

    def wait(self) -> None:
        if self.on_wait is not None:
            self.on_wait()
        assert self.done.wait(DEADLINE_SECONDS)


class Count:
    """Of what another thread does."""

    def __init__(self) -> None:
        self._changed, self._count = Condition(), 0

    def add(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._count >= count, DEADLINE_SECONDS)


class LateExecutor:
    name = arithmetic = "late"
    config = TINY

    def __init__(self, steps_ahead: int = 2, *, at_once: bool = False) -> None:
        self.steps_ahead = steps_ahead
        self.samples_on_host = True
        self.draft_rows_max, self.row_cost = 0, 0.0
        self.at_once = at_once
        "Steps are done when they are launched."
        self.launched: list[Late] = []
        self.collected = 0
        self.fails: dict[tuple[int, int], Failure] = {}
        "(number of the launch, slot) -> why."
        self._states: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self.on_wait: Callable[[], None] | None = None
        self.launches = Count()
        self.closed = False

    def prepare(self) -> None:
        pass

    def send_tables(self, sequences: InputBatch) -> None:
        pass

    def launch(self, batch: FlatBatch, sampling: SamplingBatch) -> Late:
        assert len(self.launched) - self.collected < self.steps_ahead
        spans, number = batch.spans, len(self.launched)
        tokens, failed, fed_back = np.zeros(len(spans.slots), np.int64), {}, []
        for place, slot in enumerate(spans.slots.tolist()):
            first, end = int(spans.starts[place]), int(spans.starts[place + 1])
            state = self._states.get(slot, 0) if spans.contexts[place] else 0
            for row in range(first, end):
                token = int(batch.token_ids[row])
                if token == FEEDBACK:
                    token = self._last[int(batch.feedback_slots[row])]
                    fed_back.append(slot)
                state = (state * 31 + token + 1) % 99991
            self._states[slot] = state
            if batch.due[place]:
                tokens[place] = self._last[slot] = state % TINY.vocab_size
            if (number, slot) in self.fails:
                failed[place] = self.fails[number, slot]
                tokens[place] = -1
        late = Late(Sampled(tokens, failed), fed_back, self.on_wait)
        if self.at_once:
            late.done.set()
        self.launched.append(late)
        self.launches.add()
        return late

    def collect(self, launched: Late) -> Sampled:
        assert launched is self.launched[self.collected]
        launched.wait()
        self.collected += 1
        return launched.sampled

    def report_progress(self, word: ProgressWord) -> None:
        pass

    def close(self) -> None:
        self.closed = True
