"""53, as an outcome: a request that is more urgent than all others of an instance is admitted within a few plans.

Every sequence on the worker can be preempted for it, or comes after it, and the instance accepts no request that does not fit
into the pool alone. So only drops that the worker has not acknowledged may delay it: that takes as many plans as are in flight,
and one to preempt. No formula of the scheduler is repeated here.

A plan is not counted if another resource may be short: growth or pressure from outside preempts in it, copies, leases, or
prompts kept for another instance hold blocks, or a reservation waits for blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.core.engine.phase import Phase
from baton.core.engine.request import Sequence
from baton.core.engine.view import SchedulerView
from baton.errors import InvariantBroken
from baton.protocol.step import StepPlan

SPARE_PLANS = 2
"""Number of plans until admission: one that preempts, and one that admits."""


class UrgencyWatch:
    def __init__(self, view: SchedulerView, steps_in_flight: int, saw: Callable[[str], None]) -> None:
        self._view = view
        self._plans_max = steps_in_flight + SPARE_PLANS
        self._saw = saw
        self._head: Sequence | None = None
        self._plans = 0
        "Plans since one before this head ran, in which the head was more urgent than all others and was not admitted."

    def planned(self, plan: StepPlan) -> None:
        view, head = self._view, self._view.queue_head()
        if head is None or head is not self._head:
            self._head, self._plans = head, 0
        if head is None:
            return
        others = (*view.running(), *view.preempting())
        if any(other.order < head.order for other in others):
            self._plans = 0  # the earlier head was first by `order`, and dropping it takes plans again
        if any(other.priority <= head.priority for other in others) or self._something_else_is_short(plan):
            return
        self._plans += 1
        if self._plans == 1 and view.running():
            self._saw("a request came that is more urgent than all that run")
        if self._plans > self._plans_max:
            raise InvariantBroken(
                f"step {plan.step}: {head!r} is more urgent than all others, fits alone, and waits since {self._plans} plans",
                invariant=53,
            )

    def _something_else_is_short(self, plan: StepPlan) -> bool:
        load = self._view.load()
        slot_owners = (self._view.slot_owner(slot, incarnation) for slot, incarnation in plan.drops)
        preempts = any(sequence is not None and sequence.phase is Phase.PREEMPTING for sequence in slot_owners)
        return bool(preempts or load.loading or load.kept or self._view.awaiting())
