"""The checks of a plain instance, whose clients talk to it directly: every event, every result, every answer, and rest.

The core audits itself (core/engine/proof.py); this on_event at it from outside, with knowledge of its own: the closed-form
output of every request, who must be let in and when (reference.py), who owns which block (plans.py). The instance is asked
public questions only (core/engine/view.py). Numbers are those of docs/internals/reliability.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.core.effects import Effect, Mode, ModeChanged, Refuse, RestartWorker, RunStep, StopWorker
from baton.core.engine.phase import Phase
from baton.core.engine.request import Sequence
from baton.core.events import (
    Event,
    EvictSome,
    LossCause,
    PreemptSome,
    StepDone,
    Wake,
    WorkerLost,
    WorkerProgressed,
    WorkerReady,
    WorkerStopped,
)
from baton.core.instance import Instance
from baton.errors import InvariantBroken
from baton.protocol.control import OrderAnswer
from baton.protocol.ids import Instant, RequestId, WorkerEpoch
from baton.protocol.output import OTHER_WEIGHTS, Emit, Ended
from baton.protocol.request import FinishReason
from baton.protocol.step import StepPlan, StepResult
from baton.sim.engine import EngineWatch
from baton.sim.line import Line
from baton.sim.network import Network
from baton.sim.order_watch import OrderWatch
from baton.sim.plans import ExactPlanWatch
from baton.sim.reference import Reference
from baton.sim.scenario import Client, Scenario
from baton.sim.simulated_request import QueueKey, SimulatedRequest
from baton.sim.step_watch import StepWatch
from baton.sim.tags import identity_of
from baton.sim.timeline import Timeline
from baton.sim.watch import Watch

PREEMPTIONS_MAX = 24
"""Invariant 33: preemptions of one sequence, none of them forced, without a token in between."""


class AnswerReceiver(Protocol):
    """Interface of the clients that receive an instance's answers."""

    def answered(self, effects: list[Effect]) -> None: ...
    def delivered(self, emit: Emit) -> None: ...
    def refused(self, refuse: Refuse) -> None: ...
    def after_event(self) -> None: ...


class InstanceWatch(Watch, EngineWatch):
    def __init__(self, scenario: Scenario, timeline: Timeline, machine: Instance) -> None:
        super().__init__(scenario, timeline)
        self.machine = machine
        self._scenario = scenario
        self._view = machine.view
        self.clients: AnswerReceiver
        self.network: Network
        self.on_event: Callable[[], None] = lambda: None
        "Called after each event; a tracer sets it."
        self.steps = StepWatch(scenario, timeline)
        self.reference = Reference(scenario)
        self._orders = OrderWatch(machine, self.saw)
        self.line = Line()
        self.plans = ExactPlanWatch(scenario, machine.view, self, self.reference, self.line)
        self.model = self.plans.model
        self.weights = 0
        "Weights of the worker, as far as the instance knows."
        self._outdated: list[SimulatedRequest] = []
        "Requests that had begun when a worker with other weights got ready."
        self._event: Event
        self._in_flight: list[StepPlan] = []
        "Plans in flight when the present event began."
        self._lost_before = self._stale_before = 0
        "The instance's statistics when the present event or result came."
        self._idle = False
        "Whether the worker owed nothing when the present event began."
        self._due = False
        "Whether the result at hand is that of the oldest step in flight."
        self._results: dict[int, StepResult] = {}
        "Results of this worker epoch that are not absorbed yet, by step."
        self._absorbed: list[tuple[int, StepResult]] = []
        self._broken = self._broken_early = False
        "Whether a broken result overtook an older one. The instance finds it when its turn comes."
        self._pool_spoiled = False
        "Whether a worker broke the protocol: it may have written anywhere."
        self._preempting: dict[Sequence, int] = {}
        self._deaths: dict[str, int] = {}
        self._losses: dict[tuple[str, int], int] = {}
        self._idle_steps = 0
        poison = sum(client.n for client in scenario.clients if client.poison_at is not None)
        faults = sum(fault.kind not in ("late", "repeat", "ghost") for fault in scenario.steps)
        loops = sum(int(nudge.amount) for nudge in scenario.nudges if nudge.kind == "crash_loop")
        self._culprits = max(1, poison + faults + loops)
        "Number of losses that look like the fault of a request. Each may hide the next."

    def add(self, request: SimulatedRequest) -> None:
        super().add(request)
        for index in range(request.client.n):
            self._losses.pop((request.client.id, index), None)

    # Answers as clients get them

    def submitted(self, request: SimulatedRequest) -> None:
        request.weights = self.weights
        request.sequences = self._view.sequences(RequestId(request.client.id))
        request.orders = [self.reference.order(request.client, index) for index in range(request.client.n)]
        self.line.joins(request, 0)

    def gets(self, request: SimulatedRequest, index: int, token: int) -> None:
        request.thrash[index] = 0
        if not index and len(request.delivered[0]) == 1:
            self.line.siblings_join(request)
        if token == 0:
            self.saw("token 0 was delivered")

    def take_in(self, *, given: bool = False) -> None:
        """Update the models with the steps absorbed in this event, after tokens are delivered and before sequences end."""
        if given:
            self._idle_steps = 0
        absorbed, self._absorbed = self._absorbed, []
        for step, result in absorbed:
            self.line.absorbed(step)
            if self.model is not None:
                self.model.absorbed(step, result)

    def ends(self, request: SimulatedRequest, ended: Ended) -> None:
        """23: usage is exactly what was computed and delivered."""
        index = ended.index
        self.reference.ended(request.client, index)
        self.line.ended(request, index)
        if self.model is not None:
            self.model.ended(request, index)
        hit = request.hit[index] or 0
        if ended.cached_tokens != hit:
            raise InvariantBroken(f"{ended.request}.{index}: usage is {ended}", invariant=23)
        below = (ended.host_tokens, ended.storage_tokens)
        if min(below) < 0 or sum(below) > (hit if self._scenario.host_blocks else 0):
            raise InvariantBroken(f"{ended.request}.{index}: {below} of {hit} tokens came from lower tiers", invariant=23)
        preempted = next((sequence.preemptions for sequence in request.sequences if sequence.index == index), 0)
        if ended.preemptions != preempted:
            raise InvariantBroken(f"{ended.request}.{index} was preempted {preempted} times: {ended}", invariant=23)

    def completes(self, request: SimulatedRequest, ended: Ended) -> None:
        if ended.reason is FinishReason.REPETITION:
            self.saw("an answer that repeats itself ended")
        if (len(request.client.prompt) + len(request.delivered[ended.index]) - 1) % self._scenario.block_size == 0:
            self.saw("an end on a block's edge")
        if any(s.index == ended.index and s in self._preempting for s in request.sequences):
            self.saw("the last token was in flight at a preemption")

    def failed(self, request: SimulatedRequest, index: int, ended: Ended) -> None:
        """22: an error is allowed for the requests that cause one, and for all when the worker is given up."""
        outputs, client = len(request.delivered[index]), request.client
        if client.nan_at == outputs and ended.error == "row_failed":
            self.saw("one row failed, alone")
        elif client.poison_at == outputs and ended.error == "poison":
            self.saw("a poisonous request was given up")
        elif ended.detail == OTHER_WEIGHTS:
            _expect(request in self._outdated, 59, f"{ended.request}.{index} ends, and could go on with its weights")
            self.saw("an answer ended, as other weights are served")
        elif ended.error == "worker_gone" and self.reference.may_give_worker_up():
            self.saw("the worker was given up")
        elif ended.error != "poison" or self._losses.get((client.id, index), 0) < 2:
            raise InvariantBroken(f"{ended.request}.{index} fails for nothing: {ended.detail}", invariant=22)
        else:
            self.saw("a bystander was given up: the worker was lost twice at its place")

    def _mode_changed(self, mode: Mode) -> None:
        """9: a paused instance has answered all requests."""
        self._timeline.note("instance", f"is {mode}")
        self.reference.mode_changed(mode.value)
        owed = [request for request in self.requests.values() if request.submitted and not request.is_answered]
        if mode is Mode.PAUSED and owed:
            raise InvariantBroken(f"paused while {owed[0].client.id} is not answered", invariant=9)
        self.saw(f"mode: {mode}")

    # An event

    def before(self, event: Event, now: Instant) -> None:
        machine = self.machine
        self._event, self._in_flight, self._lost_before = event, machine.view.plans(), machine.stats.worker_losses
        self._idle = not self._in_flight and machine.worker.state.value == "ready"
        self.reference.before_event(event, now)
        self._orders.before(event)
        if type(event) is WorkerProgressed and event.epoch == machine.worker.epoch:
            self.steps.progressed()

    def handled(self, event: Event, effects: list[Effect]) -> None:
        for effect in effects:
            if type(effect) is Emit:  # before a loss in the same event: a worker is lost after its results are in
                # with a new token the sequence is past the place of an earlier loss
                for request, _, index, *_ in effect.tokens:
                    self._losses.pop((request, index), None)
        self._find_absorbed(event, any(type(effect) is RunStep for effect in effects))
        self.clients.answered(effects)
        if not any(type(effect) is Emit for effect in effects):
            self.take_in()

    def _find_absorbed(self, event: Event, planned: bool) -> None:
        """Find which of the plans in flight were absorbed, and whether their worker was lost."""
        plans, absorbed = self._in_flight, list[tuple[int, StepResult]]()
        if self.machine.stats.worker_losses > self._lost_before:
            self._results.clear()
            cause = event.cause if type(event) is WorkerLost else "protocol" if type(event) is StepDone else "died"
            # Results that had overtaken it are absorbed before a broken one is found: the oldest plan is then another.
            self._worker_lost(plans if type(event) is StepDone else plans[:1], cause)
        elif type(event) is StepDone and plans:
            oldest = self._view.oldest_step or plans[-1].step + 1
            absorbed = [(plan.step, self._results.pop(plan.step)) for plan in plans if plan.step < oldest]
            self.reference.steps_absorbed(len(absorbed))
        self._begin_event(event, absorbed, planned)

    def _worker_lost(self, oldest: list[StepPlan], cause: LossCause) -> None:
        """Remember the sequences that were being computed: a sequence is given up after two such losses with evidence."""
        evidence = self.reference.is_evidence(cause)
        self.reference.worker_lost(evidence=evidence, perhaps_absorbed=len(oldest))
        self.line.worker_lost()
        if self.model is not None:
            self.model.worker_lost()
        self._pool_spoiled |= cause == "protocol"
        suspects = {(request.client.id, index): None for plan in oldest for request, index in self.plans.places_of(plan)}
        for suspect in suspects if evidence else ():
            self._losses[suspect] = self._losses.get(suspect, 0) + 1

    def _begin_event(self, event: Event, absorbed: list[tuple[int, StepResult]], planned: bool) -> None:
        """Update the models before anything is delivered to clients."""
        self._absorbed = absorbed
        changed = isinstance(event, WorkerReady) and self._reloaded(event.fingerprint)
        model = self.model
        if model is None:
            return
        model.event()
        if type(event) is PreemptSome:
            for sequence in self._view.preempting():
                model.preempted_from_outside(self.requests[sequence.request.id], sequence.index)
        elif type(event) is EvictSome:
            model.cache.sync(in_order=not planned)
        elif type(event) is WorkerReady and self.machine.worker.state.value == "ready":
            if self._pool_spoiled or changed or not self._scenario.pool_kept:
                model.cache.sync(everything=True)
            elif not planned:
                model.cache.sync(kept=True)
            self._pool_spoiled = False

    def _reloaded(self, identity: bytes) -> bool:
        """Whether the ready worker has other weights. Requests without tokens begin with those, the others must end."""
        if identity == identity_of(self.weights):
            return False
        self.saw("a worker came back with other weights")
        self.weights = next(weights for weights in self.weights_known if identity_of(weights) == identity)
        for request in self.all_requests:
            if request.submitted and not request.is_answered:
                if any(request.delivered) or any(request.ended):
                    self._outdated.append(request)
                else:
                    request.weights = self.weights
        return True

    def performs(self, effect: Effect) -> None:
        match effect:
            case Emit():
                self.clients.delivered(effect)
            case RunStep(plan) if self._timeline.traced:
                self._timeline.note("instance", f"plan {plan.step}: {_plan_text(plan)}")
            case Refuse():
                self.clients.refused(effect)
            case RestartWorker():
                self._restarts_worker(effect)
            case ModeChanged(mode):
                self._mode_changed(mode)
            case StopWorker():
                self._pool_spoiled = True  # it is freed
                self.reference.slept()
            case OrderAnswer():
                self._orders.answered(effect)

    def _restarts_worker(self, effect: RestartWorker) -> None:
        """46: a worker is restarted that owes an answer, has broken the protocol, or is overdue."""
        oldest = self._in_flight[0].step if self._in_flight else 0
        if effect.cause == "protocol" and not self._broken and "ranks differed" not in self.sometimes:
            raise InvariantBroken(f"a worker that kept to the protocol is restarted: {effect.reason}", invariant=46)
        if effect.cause == "timeout":
            self.steps.given_up()
            if self.network.has_unread(WorkerEpoch(effect.epoch - 1), oldest):
                raise InvariantBroken("a worker is restarted whose answer is here, unread", invariant=46)
        if self._idle and type(self._event) is not WorkerLost:
            raise InvariantBroken("a worker that owes nothing is restarted", invariant=46)
        if type(self._event) not in (Wake, WorkerStopped):  # it is woken
            self.reference.restarted(effect.delay_seconds)
        self.forced()

    def after(self) -> None:
        """Check 22, 33, 35 and 59 for the requests of this event."""
        machine, view = self.machine, self._view
        self.steps.after_event(view.oldest_step)
        for request in self._outdated:
            _expect(request.is_answered, 59, f"{request.name} has begun, and is to go on with other weights")
        self._outdated.clear()
        self.reference.after_event(worker_gone=machine.worker.state.value == "gone")
        if view.oldest_step is None and view.has_work:
            waits = machine.worker.state.value != "ready" or machine.mode.value == "paused" or view.load().loading
            _expect(bool(waits), 35, "work and no step")
        preempting = view.preempting()
        if preempting or self._preempting:
            self._preemptions(preempting)
        if self.model is not None:
            self.model.after_event()
        self.clients.after_event()
        self.on_event()

    def forced(self) -> None:
        """A preemption from outside, or a lost worker, does not count as thrashing."""
        self._idle_steps = 0
        for request in self.all_requests:
            if not request.is_answered:
                request.thrash = [0] * request.client.n

    def _preemptions(self, preempting: list[Sequence]) -> None:
        running = self._view.running()
        for sequence in preempting:
            if self._preempting.get(sequence) == sequence.preemptions:
                continue
            self._preempting[sequence] = sequence.preemptions
            if sequence.in_flight:
                self.saw("preempted with tokens in flight")
            if sequence.computed or sequence.blocks or sequence.slot < 0:
                raise InvariantBroken(f"{sequence!r} is preempted and holds blocks, or lost its slot", invariant=31)
            if any(self._order(other) > self._order(sequence) for other in running):
                raise InvariantBroken(f"{sequence!r} is preempted and not the last in line", invariant=33)
            thrash = self.requests[sequence.request.id].thrash
            thrash[sequence.index] += 1
            if thrash[sequence.index] > PREEMPTIONS_MAX:
                raise InvariantBroken(f"{sequence!r}: preempted again and again, no token in between", invariant=33)
            if len(preempting) > 1 and not running:
                self.saw("everything was preempted")
            if sequence.preemptions > 1:
                self.saw("preempted more than once")
        for sequence in [s for s in self._preempting if s.phase is not Phase.PREEMPTING]:
            del self._preempting[sequence]

    def _order(self, sequence: Sequence) -> QueueKey:
        return self.requests[sequence.request.id].orders[sequence.index]

    # A result

    def receives(self, result: StepResult, *, broken: bool) -> None:
        if self._timeline.traced:
            self._timeline.note("worker", f"result {result.step}: {' '.join(map(str, result.values))}")
        machine, oldest = self.machine, self._view.oldest_step
        self._stale_before = machine.stats.stale_results
        of_this_life = result.epoch == machine.worker.epoch
        if not of_this_life:
            self.saw("a result of a dead worker")
        elif oldest is not None and result.step > oldest:
            self.saw("a result overtook an older one")
        self._idle_steps += 1
        if self._idle_steps > 200 + 4 * self._scenario.blocks * self._scenario.block_size:
            raise InvariantBroken(f"{self._idle_steps} steps without a token for anyone", invariant=35)
        self._due = result.step == oldest
        if of_this_life:
            self._results.setdefault(result.step, result)
            if self._due:
                self.steps.answered()
        self._broken_early |= broken and not self._due
        self._broken = broken or self._broken_early

    def received(self, result: StepResult, *, broken: bool) -> None:
        stats = self.machine.stats
        ignored = stats.stale_results > self._stale_before
        if broken and self._due and not ignored:
            self.saw("a broken result was found out")
            if stats.worker_losses == self._lost_before:
                raise InvariantBroken(f"a broken result of step {result.step} is believed", invariant=46)
        if ignored and result.epoch == self.machine.worker.epoch:
            self.saw("a result came twice")

    # The worker process

    def client_of(self, slot: int, incarnation: int) -> Client:
        return self.plans.client_of(slot, incarnation)

    def worker_dies(self) -> None:
        if self._view.preempting():
            self.saw("the worker was lost with a preemption unacknowledged")
        if self.machine.worker.losses:
            self.saw("the worker was lost twice in a row")

    def poisoned(self, client: Client | None) -> None:
        """47: a client's request kills at most log2(suspects) + 2 workers per sequence and culprit, beside those that seem to
        be killed from outside, while such kills do not count."""
        if client is not None:
            self._deaths[client.id] = self._deaths.get(client.id, 0) + 1
            unseen = self._scenario.worker_kills_max if self._scenario.poison_unseen else 0
            allowed = ((self._scenario.slots - 1).bit_length() + 2) * client.n * self._culprits
            if self._deaths[client.id] > unseen + allowed:
                raise InvariantBroken(f"{client.id} has killed {self._deaths[client.id]} workers", invariant=47)

    # At rest

    def full_check(self) -> None:
        self.machine.check_part(8)
        self.plans.generations()

    def at_rest(self) -> None:
        if self.machine.stats.folded_blocks:
            self.saw("two sequences filled the same block: folded")
        if self._view.evicted:
            self.saw("a cached block was evicted")
        if self.machine.stats.accepted_drafts:
            self.saw("a draft was accepted")
        if self.machine.stats.drafts > sum(self.machine.stats.accepted_drafts):
            self.saw("a draft was refused")
        if self.machine.stats.stale_rows:
            self.saw("a late row of a former occupant")
        if self.machine.mode.value != "paused":
            raise InvariantBroken("drained and not paused", invariant=9)
        self._orders.at_rest()


def _plan_text(plan: StepPlan) -> str:
    parts = [f"+{new.slot}.{new.incarnation}({new.computed_tokens}/{len(new.tokens)})" for new in plan.new]
    parts += [f"-{slot}.{incarnation}" for slot, incarnation in plan.drops]
    parts += [f"fold {slot}[{place}]={block}" for slot, place, block in plan.deduplicated]
    parts += [f"{slot}:{tokens}" for slot, tokens in zip(plan.run.slots, plan.run.counts, strict=True)]
    return " ".join(parts)


def _expect(ok: bool, invariant: int, message: str) -> None:
    if not ok:
        raise InvariantBroken(message, invariant=invariant)
