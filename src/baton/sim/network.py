"""The network: carries plans to a worker process and its results back, in order and at once unless a fault strikes.

In a tenth of the seeds both go through the codec, as they do between processes. Broken results are made here too: the one
who reads them must find out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec.structs import replace

from baton.errors import InvariantBroken
from baton.protocol.codec import decode, encode
from baton.protocol.ids import Incarnation, WorkerEpoch
from baton.protocol.step import PREEMPTED_TOKEN_ID, RowLogprobs, StepPlan, StepResult, TokenLogprob
from baton.sim.onlooker import Onlooker
from baton.sim.scenario import Scenario, StepFault
from baton.sim.timeline import Timeline

Wired = TypeVar("Wired", StepPlan, StepResult)


class Network:
    """The channel between an instance and its worker."""

    def __init__(self, scenario: Scenario, timeline: Timeline, watch: Onlooker) -> None:
        self._scenario = scenario
        self._timeline = timeline
        self._watch = watch
        self._broken: list[StepResult] = []
        self._frozen_until: float | None = None
        self._unread: list[StepResult] = []
        "Results that wait for an engine that does not read."
        self._plans_to_lose = [fault.step for fault in scenario.steps if fault.kind == "lose_plan"]
        self._plans_sent = 0
        self.last_step = 0
        "The plan that was sent last."
        self.deliver_plan: Callable[[StepPlan], None]
        self.deliver_result: Callable[[StepResult], None]

    def connect(self, worker: Callable[[StepPlan], None], instance: Callable[[StepResult], None]) -> None:
        """Set the receivers of plans and of results."""
        self.deliver_plan, self.deliver_result = worker, instance

    def begin(self) -> None:
        """Nothing to start: the network acts only when called."""

    def heal(self) -> None:
        """Lose no more plans. Faults of results are those of steps, which the worker process ends."""
        self._plans_to_lose = []

    def at_rest(self) -> None:
        """Everything was delivered: the heap is empty."""

    # From the instance to its worker

    def send_plan(self, plan: StepPlan) -> None:
        self._plans_sent += 1
        self.last_step = plan.step
        if self._plans_sent in self._plans_to_lose:
            self._watch.saw("a plan was lost")
            self._watch.happened("lose_plan")
            return
        self.deliver_plan(self._over_the_wire(plan))

    # From the worker to the instance

    def send_result(self, result: StepResult, faults: Mapping[str, StepFault]) -> None:
        now = self._timeline.now
        if "garble" in faults and (broken := garbled(result, int(faults["garble"].seconds))) is not None:
            self._broken.append(broken)
            result = broken
        elif "ghost" in faults:  # not both: a ghost's row may hold anything
            result = with_ghost(result)
        if "lose_result" in faults:
            self._watch.saw("a result was lost")
            return
        if "repeat" in faults:
            self._timeline.at(now + faults["repeat"].seconds, self._arrive, result)
        if "late" in faults:
            self._timeline.at(now + faults["late"].seconds, self._arrive, result)
        else:
            self._arrive(result)

    def flush(self, epoch: WorkerEpoch) -> None:
        """Deliver all results that a worker sent before it died, in order: its channel ends after them."""
        under_way = self._timeline.withdraw(self._arrive)
        for time, result in under_way:
            if result.epoch != epoch:
                self._timeline.at(time, self._arrive, result)
        for result in sorted((r for _, r in under_way if r.epoch == epoch), key=lambda result: result.step):
            self._arrive(result)

    def freeze(self, until: float | None) -> None:
        """Freeze the engine until then. None: it reads again now, possibly before the time announced."""
        announced, self._frozen_until = self._frozen_until, until
        if until is None and announced is not None and self._timeline.now < announced:
            for time, result in self._timeline.withdraw(self._arrive):
                self._timeline.at(self._timeline.now if time == announced else time, self._arrive, result)

    def has_unread(self, epoch: WorkerEpoch, step: int) -> bool:
        """Whether the answer to this plan had arrived before the engine read."""
        return any(result.epoch == epoch and result.step == step for result in self._unread)

    def is_broken(self, result: StepResult) -> bool:
        """Whether the network broke the answer."""
        return any(broken is result for broken in self._broken)

    def unpack(self, result: StepResult) -> StepResult:
        return self._over_the_wire(result)

    def _arrive(self, result: StepResult) -> None:
        if self._frozen_until is not None:
            self._unread.append(result)
            self._timeline.at(self._frozen_until, self._arrive, result)
            return
        if self._unread:
            self._unread = [unread for unread in self._unread if unread is not result]
        self.deliver_result(result)

    def _over_the_wire(self, message: Wired) -> Wired:
        if self._scenario.seed % 10:
            return message
        received = decode(encode(message))
        if received != message:
            raise InvariantBroken(f"{type(message).__name__} {message.step} is not what was sent", invariant=27)
        return received


def garbled(result: StepResult, kind: int) -> StepResult | None:
    """The result broken in one of seven ways; None where nothing in it can be broken that way."""
    rows = result.rows
    if not rows or (result.failures and kind == 2):  # a failed row may answer so
        return None
    slot, incarnation, values = rows[0]
    drafted = next((place for place, drafts in enumerate(result.drafted) if drafts and rows[place][2]), None)
    match kind:
        case 0:  # a row is missing
            rows = rows[1:]
        case 1:  # another incarnation
            rows[0] = (slot, Incarnation(incarnation + 1), values)
        case 2:  # an acknowledgement, or a token, that is invalid
            rows[-1] = (*rows[-1][:2], () if rows[-1][2] else (PREEMPTED_TOKEN_ID,))
        case 3:  # a row twice
            rows.append(rows[0])
        case 4:  # lengths that do not match the values
            return replace(result, lengths=(result.lengths[0] + 1, *result.lengths[1:]))
        case 5 if drafted is not None:  # more tokens than the drafts and one
            rows[drafted] = (*rows[drafted][:2], (1,) * (2 + result.drafted[drafted]))
        case 6 if drafted is not None:  # no token
            rows[drafted] = (*rows[drafted][:2], ())
        case _:
            return None
    return replace(StepResult.of(result.step, result.epoch, rows, result.failures), drafted=result.drafted)


def with_ghost(result: StepResult) -> StepResult:
    """The result with a late row of each slot's earlier sequence behind the true ones: it must have no effect."""
    current = dict(zip(result.slots, result.incarnations, strict=True))
    ghosts = [(slot, Incarnation(incarnation - 1)) for slot, incarnation in current.items() if incarnation > 1]
    rows = [*result.rows, *((slot, incarnation, (3,)) for slot, incarnation in ghosts)]
    row_logprobs = (RowLogprobs(slot, incarnation, TokenLogprob(3, -1.0, 1)) for slot, incarnation in ghosts)
    ghostly = StepResult.of(result.step, result.epoch, rows, result.failures, (*result.logprobs, *row_logprobs))
    return replace(ghostly, drafted=result.drafted)
