"""53, for the only sequence that an instance runs: its prompt is computed as far as a step has room.

A prompt that is handed over is the exception (core/engine/handoff_chunks.py): while no request waits, it may come in chunks of
an eighth of what is left, or of the smallest size, or more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.core.engine.view import SchedulerView
from baton.errors import InvariantBroken
from baton.protocol.ids import Incarnation
from baton.protocol.step import StepPlan
from baton.sim.scenario import Scenario

PARTS = 8


class ChunkWatch:
    def __init__(self, scenario: Scenario, view: SchedulerView, saw: Callable[[str], None]) -> None:
        scheduler = scenario.config().scheduler
        self._whole = min(scheduler.chunk_tokens_max or scheduler.tokens_per_step, scheduler.tokens_per_step)
        self._least = scheduler.handoff_chunk_tokens_min
        self._view = view
        self._saw = saw

    def planned(
        self, plan: StepPlan, incarnation: Mapping[int, int], position: Mapping[int, int], known: Mapping[int, int]
    ) -> None:
        """Check a planned step. `position`, `known`: computed tokens before this step, and prompt tokens, by slot."""
        if len(plan.run.slots) != 1:
            return
        (slot,), (count,), load = plan.run.slots, plan.run.counts, self._view.load()
        left = known[slot] - position[slot]
        if count >= min(left, self._whole) or load.running != 1 or load.preempting:  # a preempted sequence had its share
            return
        sequence = self._view.slot_owner(slot, Incarnation(incarnation[slot]))
        if sequence is None or sequence.kept is None or self._view.queue_head() is not None:
            raise InvariantBroken(f"step {plan.step} has room for more of the only prompt, in slot {slot}", invariant=53)
        if count < min(self._whole, max(self._least, -(-left // PARTS))):
            raise InvariantBroken(f"step {plan.step} computes {count} of {left} tokens to hand over", invariant=53)
        self._saw("a prompt was handed over in chunks")
