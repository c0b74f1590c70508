"""A runner without a model: it answers every plan with valid tokens, after a fixed amount of work.

The work is hashing: it needs no Python lock, so `threads` threads can do it as a kernel's threads would, and it is an amount
and not a time, so that whoever takes a core from it makes the step longer.

What it should be is JSON in $BATON_NULL_MODEL, which only this file reads:

step_bytes   hashed by each thread in a step; 0: nothing
threads      that do it
notes        file for the times of all steps, written on SIGUSR1 (null_worker.py)
"""

from __future__ import annotations

import json
import os
from array import array
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

from baton.config import WorkerConfig
from baton.protocol.step import NO_TOKEN_ID, PREEMPTED_TOKEN_ID, StepPlan, StepResult

VOCAB = 49152
ORDERS: dict[str, Any] = json.loads(os.environ.get("BATON_NULL_MODEL", "{}"))


class Notes:
    """One row a step: when the plan was asked for, when it was there, and the CPU time of the work, of all threads."""

    def __init__(self) -> None:
        self.asked, self.got, self.worked = array("d"), array("d"), array("d")

    def save(self) -> None:
        """Whole or not at all: someone waits for the file."""
        rows = {"asked": list(self.asked), "got": list(self.got), "worked": list(self.worked)}
        written = Path(ORDERS["notes"] + ".new")
        written.write_text(json.dumps(rows))
        written.rename(ORDERS["notes"])


class NullRunner:
    def __init__(self, config: WorkerConfig) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB, context_tokens_max=8192)
        self.pool = SimpleNamespace(blocks=8192, layout=SimpleNamespace(fingerprint=lambda: b"null"))
        self.notes = Notes()
        self._work = bytes(ORDERS.get("step_bytes", 0))
        self._helpers = ORDERS.get("threads", 1) - 1
        self._threads = ThreadPoolExecutor(max(1, self._helpers))
        self.clear()

    def clear(self) -> None:
        self._incarnation: dict[int, int] = {}
        self._left: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        begin = process_time()
        if self._work:
            helping = [self._threads.submit(sha256, self._work) for _ in range(self._helpers)]
            sha256(self._work)
            for helper in helping:
                helper.result()
        self.notes.worked.append(process_time() - begin)
        return self._answer(plan)

    def _answer(self, plan: StepPlan) -> StepResult:
        for new in plan.new:
            self._incarnation[new.slot] = new.incarnation
            self._left[new.slot] = len(new.tokens) - new.computed_tokens
        left, values, token = self._left, [], 300 + plan.step * 7 % 40_000
        for slot, count in zip(plan.run.slots, plan.run.counts, strict=True):
            left[slot] -= count
            values.append(token + slot if left[slot] <= 0 else NO_TOKEN_ID)
        incarnations = [self._incarnation[slot] for slot in plan.run.slots]
        for _, incarnation in plan.drops:
            incarnations.append(incarnation)
            values.append(PREEMPTED_TOKEN_ID)
        return StepResult(plan.step, plan.epoch, plan.rows, tuple(incarnations), tuple(values))


def work_bytes(step_ms: float, tries: int = 20) -> int:
    """How much can be hashed in that time, on a core that nobody else wants: the best of some tries."""
    if not step_ms:
        return 0
    sample, times = bytes(1 << 20), []
    for _ in range(tries):
        begin = perf_counter()
        sha256(sample)
        times.append(perf_counter() - begin)
    return int(len(sample) * step_ms / 1000 / min(times))
