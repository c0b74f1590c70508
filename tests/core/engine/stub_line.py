"""The core and a worker that answers at once and computes nothing: for counting steps, where tokens do not matter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.core.effects import RunStep
from baton.core.events import Event, LossCause, StepDone, Submit, WorkerLost, WorkerReady
from baton.core.instance import Instance
from baton.protocol.ids import Instant, PoolIncarnation
from baton.protocol.output import Emit
from baton.protocol.step import PREEMPTED_TOKEN_ID, StepPlan, StepResult

from .harness import make_config, make_request

STOP = 2


class StubLine:
    def __init__(self, outputs: int, **settings: Any) -> None:
        self.instance = Instance(make_config(**settings))
        self.plans: list[StepPlan] = []
        self.heard: dict[str, int] = {}
        "Tokens by request."
        self._outputs = outputs
        "Each sequence ends after so many."
        self._left: dict[int, list[int]] = {}
        "By slot: incarnation, tokens to prefill, outputs to come."
        self.dispatch(WorkerReady(self.instance.worker.epoch, PoolIncarnation(1)))

    def submit(self, name: str, prompt: Iterable[int], **given: Any) -> None:
        self.heard[name] = 0
        self.dispatch(Submit(make_request(name, prompt, stop_token_ids=(STOP,), **given)))

    def dispatch(self, event: Event) -> None:
        for effect in self.instance.handle(event, Instant(0.0)):
            if isinstance(effect, RunStep):
                self.plans.append(effect.plan)
            elif isinstance(effect, Emit):
                for request, *_ in effect.tokens:
                    self.heard[request] += 1

    def lose_worker(self, cause: LossCause, pool: int) -> None:
        self.plans.clear()
        self.dispatch(WorkerLost(self.instance.worker.epoch, cause=cause))
        self.dispatch(WorkerReady(self.instance.worker.epoch, PoolIncarnation(pool)))

    def step(self) -> None:
        plan = self.plans.pop(0)
        for new in plan.new:
            outputs = self._outputs - (len(new.tokens) - new.prompt_tokens)
            self._left[new.slot] = [new.incarnation, len(new.tokens) - new.computed_tokens, outputs]
        run = zip(plan.run.slots, plan.run.counts, strict=True)
        rows = [(slot, self._left[slot][0], self._row(slot, count)) for slot, count in run]
        rows += [(slot, incarnation, (PREEMPTED_TOKEN_ID,)) for slot, incarnation in plan.drops]
        self.dispatch(StepDone(StepResult.of(plan.step, plan.epoch, rows)))

    def _row(self, slot: int, count: int) -> tuple[int, ...]:
        left = self._left[slot]
        left[1] -= count
        if left[1] > 0:
            return ()
        left[2] -= 1
        return (7 if left[2] > 0 else STOP,)
