"""The world: virtual time, one real instance, a modelled worker, clients, faults. Chaos, heal, drain, rest.

Everything that happens is an entry in one heap ordered by (time, counter). An *event* of a run is one thing that happens to
one party, each of them checked: a submission, an abort, a timer, a fault, a plan executed, a row of it, a result taken in, a
token or an end that reaches its client. The digest covers all of it: same scenario, same digest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from baton.core.effects import Effect, ModeChanged, Refuse, RestartWorker, RunStep
from baton.core.engine.instance import Instance
from baton.core.events import (
    Abort,
    Event,
    EvictSome,
    LossCause,
    Pause,
    PreemptSome,
    Resume,
    StepDone,
    Submit,
    Tick,
    WorkerLost,
    WorkerReady,
)
from baton.errors import InvariantBroken
from baton.protocol.codec import decode, encode
from baton.protocol.ids import Incarnation, Instant, PoolIncarnation, RequestId, WorkerEpoch
from baton.protocol.output import Emit
from baton.protocol.request import FinishReason, Refused
from baton.protocol.step import NO_TOKEN_ID, PREEMPTED_TOKEN_ID, StepPlan, StepResult
from baton.sim.scenario import VOCAB, Client, Nudge, Scenario, StepFault
from baton.sim.watch import Trip, Watch
from baton.sim.worker import SimWorker, WorkerDied

Wired = TypeVar("Wired", StepPlan, StepResult)
_ENCODE = msgspec.msgpack.Encoder().encode
_PACK_TIME = struct.Struct("<d").pack

HEALED_EVENTS_MAX = 200
"""Invariant 35: more than three small requests need on a healthy instance."""
EVENTS_MAX = 400_000
"""Invariant 35: a run that needs more is not getting anywhere."""
FULL_CHECK_EVERY = 64


class Tracer(Protocol):
    """Sees everything; changes nothing (trace.py)."""

    def note(self, now: float, actor: str, text: str) -> None: ...
    def after(self, now: float, world: World) -> None: ...


class Outcome(Struct):
    seed: int
    events: int
    requests: int
    tokens: int
    virtual_seconds: float
    digest: str
    sometimes: dict[str, int]
    invariant: int | None = None
    "The invariant that failed; 0 for an exception of another kind."
    violation: str = ""


class World:
    def __init__(self, scenario: Scenario, tracer: Tracer | None = None) -> None:
        self.scenario = scenario
        self.instance = Instance(scenario.config())
        self.watch = Watch(scenario, self.instance)
        self.worker = SimWorker(scenario.blocks, scenario.block_size, self.watch.client_of)
        self.now = 0.0
        self.events = 0
        self._tracer = tracer
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._digest = blake2b(digest_size=16)
        self._epoch = WorkerEpoch(1)
        self._busy_until = 0.0
        self._steps_begun = 0
        self._step_faults: dict[int, list[StepFault]] = {}
        self._clock_offset = 0.0
        self._armed: float | None = None
        self._restarts_to_fail = 0
        self._sent_again = False
        self._refused: Refused | None = None
        self._pending: tuple[Trip, Refused | None] | None = None
        "A request that is being submitted, and the answer that it should get."
        self._restarts_to_hang = 0
        self._healed = False
        self._garbled: list[StepResult] = []
        self._garbled_early = self._broken = False
        "A broken result overtook an older one, and is found out when its turn comes."
        self._next_full_check = FULL_CHECK_EVERY
        self._watching: list[Trip] = []
        "Clients that leave when their request comes into a certain phase."
        self._lasting_faults = [fault for fault in scenario.steps if fault.every and fault.kind in ("late", "repeat", "ghost")]
        for fault in scenario.steps:
            self._step_faults.setdefault(fault.step, []).append(fault)

    @property
    def total_events(self) -> int:
        return self.events + self.watch.rows + self.watch.deliveries

    # The run

    def run(self) -> Outcome:
        invariant, violation = None, ""
        try:
            self._play()
        except InvariantBroken as broken:
            invariant, violation = broken.invariant, str(broken)
        except Exception as error:  # a crash of the core is a finding too
            invariant, violation = 0, f"{type(error).__name__}: {error}"
        return Outcome(
            seed=self.scenario.seed,
            events=self.total_events,
            requests=len(self.scenario.clients),
            tokens=self.watch.tokens,
            virtual_seconds=self.now,
            digest=self._digest.hexdigest(),
            sometimes=self.watch.sometimes,
            invariant=invariant,
            violation=violation,
        )

    def _play(self) -> None:
        self._at(0.0, self._worker_ready, self._epoch)
        for trip in self.watch.trips.values():
            self._at(trip.client.at, self._submit, trip)
            if trip.client.abort_at is not None:
                self._at(trip.client.abort_at, self._abort, trip)
            if trip.client.again_at is not None:
                self._at(trip.client.again_at, self._again, trip)
        for nudge in self.scenario.nudges:
            self._at(nudge.at, self._nudge, nudge)
        self._until_quiet()
        self._heal()
        self._note("world", "drain")
        self._tell(Pause())
        self._until_quiet()
        self._full_check()
        self.watch.at_rest()
        if self.instance.mode.value != "paused":
            raise InvariantBroken("drained and not paused", invariant=9)

    def _heal(self) -> None:
        """Faults stop, a gone worker is replaced by hand, the instance is resumed: fresh requests must succeed."""
        self._note("world", "healed: resume")
        self._healed = True
        if self.instance.worker.state.value == "gone":
            self.watch.saw("a gone worker was replaced")
            self._epoch = self.instance.worker.epoch
            self.worker.die(self.scenario.pool_kept)
            self._worker_ready(self._epoch)
        self._tell(Resume())
        self._until_quiet()
        fresh = [Client(id=f"fresh{n}", at=self.now, prompt=[n % VOCAB], max_tokens=1 + n, seed=n) for n in range(3)]
        for client in fresh:
            trip = self.watch.trips[client.id] = Trip(client)
            self._submit(trip)
        begun = self.events
        self._until_quiet()
        for client in fresh:
            trip = self.watch.trips[client.id]
            too_big = trip.refused in ("never_fits", "never_queued", "queue_full", "queue_tokens_full")
            if not too_big and not all(reason in ("stop", "length") for reason in trip.ended):
                raise InvariantBroken(f"{client.id}: {trip.refused or trip.ended} after everything was healed", invariant=35)
        if self.events - begun > HEALED_EVENTS_MAX:
            raise InvariantBroken(f"three small requests took {self.events - begun} events", invariant=35)

    def _until_quiet(self) -> None:
        heap, digest = self._heap, self._digest
        while heap:
            self.now, _, action, argument = heappop(heap)
            self.events += 1
            digest.update(_PACK_TIME(self.now) + action.__name__.encode())
            action(argument)
            if self.total_events >= self._next_full_check:
                self._full_check()
                self._next_full_check = self.total_events + FULL_CHECK_EVERY
            if self.events > EVENTS_MAX:
                raise InvariantBroken(f"not quiet after {EVENTS_MAX} events", invariant=35)

    def _full_check(self) -> None:
        self.instance.check()
        self.watch.generations()

    def _at(self, time: float, action: Callable[[Any], None], argument: Any) -> None:
        heappush(self._heap, (max(time, self.now), next(self._order), action, argument))

    def _note(self, actor: str, text: str) -> None:
        if self._tracer is not None:
            self._tracer.note(self.now, actor, text)

    # The instance

    def _tell(self, event: Event, at_least: float = 0.0) -> None:
        plans, losses = tuple(self.instance.in_flight), self.instance.stats.worker_losses
        idle = not plans and self.instance.worker.state.value == "ready"
        told = Instant(max(self.now + self._clock_offset, at_least))
        self.watch.reference.before_event(event, told)
        effects = self.instance.handle(event, told)
        for effect in effects:
            if type(effect) is Emit:
                self.watch.progressed(effect)  # before a loss in the same event: a worker is lost after its results are in
        if type(event) is StepDone and plans and self.instance.stats.worker_losses == losses:
            oldest_step = self.instance.in_flight[0].plan.step if self.instance.in_flight else plans[-1].plan.step + 1
            self.watch.reference.steps_absorbed(sum(issued.plan.step < oldest_step for issued in plans))
        if self.instance.stats.worker_losses > losses:
            cause = event.cause if type(event) is WorkerLost else "died"
            # Results that had overtaken it are absorbed before a broken one is found: the oldest plan is then another.
            oldest = plans if type(event) is StepDone else plans[:1]
            self.watch.worker_lost([issued.plan for issued in oldest], cause)
        if self._pending is not None:
            trip, expected = self._pending
            self._pending = None
            got = next((effect.refused for effect in effects if type(effect) is Refuse), None)
            self.watch.reference.answered(trip.client, expected, got)
            if got is None:
                self.watch.submitted(trip)
        for effect in effects:  # clients first: a plan must agree with what they have been told
            if type(effect) is Emit:
                self._emit(effect)
        for effect in effects:
            if type(effect) is RunStep:
                self._run_step(effect.plan)
            else:
                self._do(effect)
                if idle and type(effect) is RestartWorker and type(event) is not WorkerLost:
                    raise InvariantBroken("a worker that owes nothing is restarted", invariant=46)
        self.watch.after()
        if self._watching:
            self._phase_aborts()
        self._arm()
        if self._tracer is not None:
            self._tracer.after(self.now, self)

    def _run_step(self, plan: StepPlan) -> None:
        self.watch.plan(plan)
        plan = self._over_the_wire(plan)
        self._digest.update(_ENCODE(plan))
        scenario = self.scenario
        seconds = scenario.step_seconds + scenario.token_seconds * plan.tokens
        seconds *= 1.0 + scenario.noise * _noise(scenario.seed, plan.step)
        self._busy_until = max(self.now, self._busy_until) + seconds
        if self._tracer is not None:
            self._note("instance", f"plan {plan.step}: {_plan_text(plan)}")
        self._at(self._busy_until, self._step, plan)

    def _over_the_wire(self, message: Wired) -> Wired:
        """In a tenth of the seeds plans and results go through the codec, as they do between processes."""
        if self.scenario.seed % 10:
            return message
        received = decode(encode(message))
        if received != message:
            raise InvariantBroken(f"{type(message).__name__} {message.step} is not what was sent", invariant=27)
        return received

    def _do(self, effect: Effect) -> None:
        if not isinstance(effect, Emit):
            self._digest.update(_ENCODE(effect))
        match effect:
            case Refuse(request, refused):
                self._note("client", f"{request} refused: {refused.reason}")
                self.watch.saw(f"refused: {refused.reason}")
                self._refused = refused
                if not self._sent_again:
                    self.watch.refused(effect)
            case RestartWorker(epoch, cause, reason, delay):
                if cause == "protocol" and not self._broken:
                    raise InvariantBroken(f"a worker that kept to the protocol is restarted: {reason}", invariant=46)
                self._note("worker", f"killed ({reason}); starting epoch {epoch}")
                self.watch.forced()
                self.worker.die(self.scenario.pool_kept)
                self._epoch = epoch
                self._busy_until = self.now
                if self._restarts_to_hang and not self._healed:
                    self._restarts_to_hang -= 1
                    self.watch.saw("a restart never spoke")
                else:
                    self._at(self.now + delay + self.scenario.restart_seconds, self._worker_ready, epoch)
            case ModeChanged(mode):
                self._note("instance", f"is {mode}")
                self.watch.mode_changed(mode)

    def _emit(self, emit: Emit) -> None:
        self.watch.emitted(emit, self.now)
        self._digest.update(_ENCODE((emit.tokens, emit.ended)))
        if self._tracer is not None:
            for request, _, index, _, token in emit.tokens:
                self._note("client", f"{request}.{index} gets {token}")
        for trip in self.watch.take_stopped():
            self._at(self.now, self._stop_string, trip)
        for ended in emit.ended:
            self._note("client", f"{ended.request}.{ended.index} ends: {ended.reason} {ended.detail}")
            trip = self.watch.trips[ended.request]
            if trip.client.abort_in == "end" and not trip.aborted:
                self._at(self.now, self._abort, trip)
            if trip in self._watching and None not in trip.ended and trip.client.abort_in != "closing":
                self._watching.remove(trip)

    def _arm(self) -> None:
        """One timer is enough: it is re-armed when it fires too early."""
        deadline = self.instance.next_deadline()
        if deadline is None:
            return
        due = max(self.now, deadline - self._clock_offset)
        if self._armed is None or due < self._armed:
            self._armed = due
            self._at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        if self._armed != due:
            return  # an earlier timer took its place
        self._armed = None
        deadline = self.instance.next_deadline()
        if deadline is not None and deadline - self._clock_offset <= self.now + 1e-9:
            self._tell(Tick(), at_least=deadline)  # rounding must not make the timer spin
        else:
            self._arm()

    # Clients

    def _submit(self, trip: Trip) -> None:
        self._note("client", f"{trip.client.id} submits {len(trip.client.prompt)} + {trip.client.max_tokens}")
        trip.submitted = True
        self._ask(trip)
        self.watch.submitted(trip)
        if trip.client.abort_in is not None and trip.sequences:
            self._watching.append(trip)
            self._phase_aborts()

    def _again(self, trip: Trip) -> None:
        """The same id while the first is open: refused, and the first goes on as if nothing had happened."""
        if not trip.submitted or trip.refused or RequestId(trip.client.id) not in self.instance.board.groups:
            return
        self._note("client", f"{trip.client.id} submits again")
        self._sent_again = True
        self._ask(trip)
        self._sent_again = False

    def _ask(self, trip: Trip) -> None:
        """Refused or not: as the reference says."""
        reference = self.watch.reference
        expected = reference.refusal(trip.client, self.instance.worker.state.value == "gone")
        self._refused = None
        self._pending = trip, expected
        self._tell(Submit(trip.request))

    def _stop_string(self, trip: Trip) -> None:
        self.watch.saw("a stop string ended one sequence")
        self._tell(Abort(RequestId(trip.client.id), trip.client.n - 1, FinishReason.STOP))
        self._must_have_ended(trip, trip.ended[-1:])

    def _abort(self, trip: Trip) -> None:
        if not trip.submitted:
            return
        phases = [sequence.phase.value for sequence in trip.sequences]
        for phase in phases:
            self.watch.saw(f"abort while {phase}")
        if trip.ended_at == self.now:
            self.watch.saw("abort in the tick of an end")
        trip.aborted = True
        self._note("client", f"{trip.client.id} leaves")
        self._tell(Abort(RequestId(trip.client.id)))
        self._must_have_ended(trip, trip.ended)

    def _must_have_ended(self, trip: Trip, ended: list[FinishReason | None]) -> None:
        """22: an abort ends what is open in that very event."""
        if trip.refused is None and None in ended:
            raise InvariantBroken(f"{trip.client.id} was aborted and is still open", invariant=22)

    def _phase_aborts(self) -> None:
        for trip in list(self._watching):
            wanted = trip.client.abort_in
            for sequence in trip.sequences:
                if sequence.phase.value == wanted:
                    self._watching.remove(trip)
                    trip.aborted = True
                    self._at(self.now, self._abort, trip)
                    break

    # The worker

    def _worker_ready(self, epoch: WorkerEpoch) -> None:
        if epoch != self._epoch:
            return
        if self._restarts_to_fail and epoch > 1 and not self._healed:
            self._restarts_to_fail -= 1
            self._note("worker", f"epoch {epoch} does not start")
            self.watch.saw("a restart failed")
            self._tell(WorkerLost(epoch, "did not start"))
            return
        self._note("worker", f"ready, epoch {epoch}")
        pool = PoolIncarnation(1 if self.scenario.pool_kept else int(epoch))
        self._tell(WorkerReady(epoch, pool))

    def _step(self, plan: StepPlan) -> None:
        """The worker has come to the end of a step: execute it now, send the result, unless something goes wrong."""
        if plan.epoch != self._epoch:
            return  # the process that had this plan is dead
        self._steps_begun += 1
        lasting = (fault for fault in self._lasting_faults if fault.step <= self._steps_begun)
        faults = {fault.kind: fault for fault in (*lasting, *self._step_faults.pop(self._steps_begun, ()))}
        if self._healed:
            faults = {}
        if "hang" in faults:
            self.watch.saw("the worker hung")
            self._epoch = WorkerEpoch(-1)  # it does nothing more, and says nothing
            return
        if "slow" in faults:
            self._steps_begun -= 1  # the same step comes again, later
            self._step_faults[self._steps_begun + 1] = [fault for fault in faults.values() if fault.kind != "slow"]
            self._hold_back(plan, faults["slow"].seconds)
            return
        if "crash_before" in faults:
            self._crash("before a step")
            return
        try:
            result = self.worker.execute(plan, die_after=len(plan.run.slots) // 2 if "crash_amid" in faults else None)
        except WorkerDied as died:
            self.watch.poisoned(died.client)
            self._crash("amid a step")
            return
        if "crash_after" in faults:
            self._crash("after a step")
            return
        if "garble" in faults and (broken := garbled(result, int(faults["garble"].seconds))) is not None:
            self._garbled.append(broken)
            result = broken
        elif "ghost" in faults:  # not both: a ghost's row may say anything
            result = _with_ghost(result, self.scenario.slots)
        if "lose_result" in faults:
            self.watch.saw("a result was lost")
            return
        if "repeat" in faults:
            self._at(self.now + faults["repeat"].seconds, self._result, result)
        if "late" in faults:
            self._at(self.now + faults["late"].seconds, self._result, result)
        else:
            self._result(result)

    def _hold_back(self, plan: StepPlan, seconds: float) -> None:
        """This step takes longer, and so every step queued behind it ends later."""
        self._busy_until = max(self._busy_until, self.now) + seconds
        queued = sorted(entry for entry in self._heap if entry[2] == self._step)
        for entry in queued:
            self._heap.remove(entry)
        heapify(self._heap)
        self._at(self.now + seconds, self._step, plan)
        for at, _, _, later in queued:
            self._at(at + seconds, self._step, later)

    def _result(self, result: StepResult) -> None:
        self.events += 1
        if self._tracer is not None:
            self._note("worker", f"result {result.step}: {' '.join(map(str, result.values))}")
        before = self.instance.stats.stale_results
        if result.epoch != self.instance.worker.epoch:
            self.watch.saw("a result of a dead worker")
        elif self.instance.in_flight and result.step > self.instance.in_flight[0].plan.step:
            self.watch.saw("a result overtook an older one")
        self.watch.step_absorbed()
        due = bool(self.instance.in_flight) and result.step == self.instance.in_flight[0].plan.step
        self._broken = any(broken is result for broken in self._garbled)
        if self._broken and not due:
            self._garbled_early = True
        self._broken = self._broken or self._garbled_early
        losses = self.instance.stats.worker_losses
        self._tell(StepDone(self._over_the_wire(result)))
        if any(broken is result for broken in self._garbled) and due and before == self.instance.stats.stale_results:
            self.watch.saw("a broken result was found out")
            if self.instance.stats.worker_losses == losses:
                raise InvariantBroken(f"a broken result of step {result.step} is believed", invariant=46)
        if self.instance.stats.stale_results > before and result.epoch == self.instance.worker.epoch:
            self.watch.saw("a result came twice")

    def _crash(self, when: str, cause: LossCause = "died") -> None:
        self._note("worker", f"dies {when}")
        if self.instance.board.preempting:
            self.watch.saw("the worker was lost with a preemption unacknowledged")
        if self.instance.worker.losses:
            self.watch.saw("the worker was lost twice in a row")
        self.worker.die(self.scenario.pool_kept)
        dead, self._epoch = self._epoch, WorkerEpoch(-1)  # nothing it had queued is executed
        self._deliver_last_results(dead)
        self._tell(WorkerLost(dead, f"died {when}", cause))

    def _deliver_last_results(self, epoch: WorkerEpoch) -> None:
        """What a worker sent before it died is read before its channel ends."""
        sent = sorted(entry for entry in self._heap if entry[2] == self._result and entry[3].epoch == epoch)
        for entry in sent:
            self._heap.remove(entry)
        heapify(self._heap)
        for result in sorted((entry[3] for entry in sent), key=lambda result: result.step):
            if self.instance.worker.epoch == epoch:
                self._result(result)

    # Nudges

    def _nudge(self, nudge: Nudge) -> None:
        self._note("world", f"{nudge.kind} {nudge.amount:.2f}")
        amount = max(1, int(nudge.amount))
        match nudge.kind:
            case "preempt":
                self.watch.forced()
                self._tell(PreemptSome(amount))
            case "evict":
                self._tell(EvictSome(amount))
            case "crash":
                if self._epoch == self.instance.worker.epoch and self.instance.worker.state.value == "ready":
                    self._crash("from outside", "killed")
            case "clock":
                self._clock_offset += nudge.amount
                self.watch.saw("the clock jumped back" if nudge.amount < 0 else "the clock jumped ahead")
                self._armed = None
                self._arm()
            case "pause":
                self._tell(Pause(nudge.amount))
            case "resume":
                self._tell(Resume())
            case "restart_fails":
                self._restarts_to_fail += amount
            case "restart_hangs":
                self._restarts_to_hang += 1


def _noise(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on the step alone, so that taking a request out does not re-roll the others."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xD6E8FEB86659FD93) & (1 << 64) - 1
    mixed = (mixed ^ mixed >> 31) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    return (mixed >> 40) / (1 << 24)


def garbled(result: StepResult, kind: int) -> StepResult | None:
    """Broken in one of five ways; None where this result has nothing to break that way."""
    slots, incarnations, values = list(result.slots), list(result.incarnations), list(result.values)
    if not slots:
        return None
    match kind % 5:
        case 0:  # a row is missing
            del slots[0], incarnations[0], values[0]
        case 1:  # another incarnation
            incarnations[0] = Incarnation(incarnations[0] + 1)
        case 2:  # an acknowledgement, or a token, that is none
            values[-1] = NO_TOKEN_ID if values[-1] != NO_TOKEN_ID else PREEMPTED_TOKEN_ID
        case 3:  # a row twice
            slots, incarnations, values = [*slots, slots[0]], [*incarnations, incarnations[0]], [*values, values[0]]
        case 4:  # columns of different lengths
            del values[-1]
    if result.failures and kind % 5 == 2:
        return None  # the row that failed may answer so
    return StepResult(result.step, result.epoch, tuple(slots), tuple(incarnations), tuple(values), result.failures)


def _with_ghost(result: StepResult, slots: int) -> StepResult:
    """A late row of each slot's former occupant, behind the true ones: inert, or a bug."""
    current = dict(zip(result.slots, result.incarnations, strict=True))
    ghosts = [(slot, incarnation - 1) for slot, incarnation in current.items() if incarnation > 1]
    return StepResult(
        result.step,
        result.epoch,
        (*result.slots, *(slot for slot, _ in ghosts)),
        (*result.incarnations, *(incarnation for _, incarnation in ghosts)),  # type: ignore[arg-type]
        (*result.values, *(3 for _ in ghosts)),
        result.failures,
    )


def _plan_text(plan: StepPlan) -> str:
    parts = [f"+{new.slot}.{new.incarnation}({new.computed_tokens}/{len(new.tokens)})" for new in plan.new]
    parts += [f"-{slot}.{incarnation}" for slot, incarnation in plan.drops]
    parts += [f"fold {slot}[{place}]={block}" for slot, place, block in plan.folded]
    parts += [f"{slot}:{tokens}" for slot, tokens in zip(plan.run.slots, plan.run.counts, strict=True)]
    return " ".join(parts)
