"""A life of an engine process: a real instance, its worker process, its cache service, the pool that these share.

The engine's owner (instance.py) gets the machine's answers to clients and routers. An `EngineWatch` may check every event.
The memory of a dead engine may still be read by processes that have mapped it; nothing else is left of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from baton.config import InstanceConfig
from baton.core.effects import Effect, ModeChanged, Refuse, RestartCache, RestartWorker, RunStep, SendToCache, StopWorker
from baton.core.engine.idle_probe import IdleProbe
from baton.core.engine.progress_watch import ProgressWatch
from baton.core.events import Event, Resume, StepDone, Submit, Tick, Wake, WorkerReady, WorkerSilent, WorkerStopped
from baton.core.instance import Instance
from baton.errors import InvariantBroken
from baton.protocol.handoff import Adopted, Offer, Prefill, Release, Released, Reserve, Reserved
from baton.protocol.ids import Instant, WorkerEpoch
from baton.protocol.output import Emit
from baton.protocol.request import GenerateRequest
from baton.protocol.step import StepPlan, StepResult
from baton.sim.cache import NO_PEERS, CacheService, SimulatedObject, SimulatedPeers
from baton.sim.clock import Clock
from baton.sim.network import Network
from baton.sim.onlooker import Onlooker, PlansSeen
from baton.sim.process import NO_EPOCH, WorkerProcess
from baton.sim.rest import check_rest
from baton.sim.room_watch import RoomWatch
from baton.sim.scenario import Client, InstanceRole, Scenario
from baton.sim.tiers_watch import KeyContents, TierWatch
from baton.sim.timeline import Timeline

Outward = Emit | Refuse | Reserved | Offer | Release | Released | Adopted | ModeChanged
TIME_MARGIN = 1e-6
STOP_SECONDS = 0.05
PONG_SECONDS = 0.001
NOTICE_SECONDS = 2.0
"""Until the next ping, and the heartbeat that finds it unanswered."""
REPLACED_SECONDS = 1.0
"""Seconds after which a lost worker is replaced by hand, once faults are healed."""
POOLS_EACH = 1_000
"""Number of pool incarnations per life of an instance: no two lives share one."""


class Plans(PlansSeen, Protocol):
    """The check of the plans that the instance makes."""

    def check(self, plan: StepPlan) -> None: ...

    def received(self, result: StepResult) -> None: ...

    def client_of(self, slot: int, incarnation: int) -> Client: ...


class EngineWatch:
    """Hooks for each event of an engine. This class checks nothing."""

    def before(self, event: Event, now: Instant) -> None:
        """Called before the instance handles the event."""

    def handled(self, event: Event, effects: list[Effect]) -> None:
        """Called after the instance has handled the event; none of the effects is performed yet."""

    def performs(self, effect: Effect) -> None:
        """Called before the effect is performed."""

    def after(self) -> None:
        """Called after all effects of the event are performed."""

    def receives(self, result: StepResult, *, broken: bool) -> None:
        """Called before the instance gets a result."""

    def received(self, result: StepResult, *, broken: bool) -> None:
        """Called after the instance has handled the result."""

    def full_check(self) -> None:
        """Scan everything, at intervals."""


class EngineOwner(Protocol):
    """The simulated instance whose engine this is (instance.py)."""

    def gets(self, effects: list[Outward]) -> None:
        """Receive the effects of an event that go to clients and routers."""

    def defer(self, event: Event) -> bool:
        """Queue an event of a frozen engine. False: the event waits in the engine's inbox."""

    def performs(self, effect: Effect) -> None:
        """Called before the effect is performed."""

    def has_other_weights(self) -> None:
        """Called when a restarted worker has other weights than the one before."""


class SimulatedEngine:
    def __init__(
        self,
        name: str,
        role: InstanceRole,
        scenario: Scenario,
        timeline: Timeline,
        clock: Clock,
        instance: Instance,
        owner: EngineOwner,
        watch: EngineWatch,
        plans: Plans,
        onlooker: Onlooker,
        contents: KeyContents,
        on_disk: Callable[[], int],
        storage: dict[bytes, SimulatedObject] | None = None,
        peers: SimulatedPeers = NO_PEERS,
        first_pool: int = 0,
    ) -> None:
        """`onlooker`: observer of the worker's lives. `on_disk`: the weights that the next worker loads."""
        label = f"{name} " if name else ""
        self.instance = instance
        self.plans = plans
        self.network = Network(scenario, timeline, onlooker)
        self.tiers = TierWatch(instance.view, plans, contents, wants_tokens=scenario.storage_tokens)
        self.cache: CacheService | None = None
        if role != "mixed" or scenario.host_blocks:
            self.cache = CacheService(scenario, timeline, self.tiers, onlooker, storage, peers, f"{label}cache")
            self.cache.connect(self.receive)
        self.process = WorkerProcess(scenario, timeline, onlooker, self.network, self.cache, first_pool, f"{label}worker")
        self.process.connect(self.receive)
        self.process.on_disk = on_disk
        self.network.connect(self.process.take, self._receive)
        self._shares = scenario.prefix_caching
        "Requests share cached blocks. Otherwise each has keys of its own."
        self._probe = IdleProbe()
        self._idle_hang_at: float | None = None
        "When the present worker began to hang without work."
        self.worker_fault = ""
        "That an idle worker does not answer, as heartbeats report it."
        self.results = 0
        "Number of results that the instance received."
        self.was_ready = False
        "Whether the worker has been ready at least once."
        self.identity = b""
        "Identity of the last worker."
        self.dead = False
        self.frozen = False
        self._by_priority = scenario.order == "priority"
        self._block_size = scenario.block_size
        self._name = name
        self._timeline = timeline
        self.clock = clock
        self._owner = owner
        self._watch = watch
        self._contents = contents
        self._onlooker = onlooker
        self._inbox: list[Event] = []
        "Events that came while the engine was frozen."
        self._broken = False
        self._armed: float | None = None
        self._latest_time = 0.0
        "The latest time that the instance has received."
        self._progress = ProgressWatch()
        self._progress_count = 0
        self._replaces_worker = False
        "Whether an operator replaces a lost worker."

    def begin(self) -> None:
        self.process.begin()
        if self.cache is not None:
            self.cache.begin()

    def die(self) -> None:
        """Die with the child processes. Peers that have mapped the pool keep that memory."""
        self.dead = True
        self.network.freeze(None)  # unread results reach a dead engine
        self.process.vanish()
        if self.cache is not None:
            self.cache.vanish()

    def heal(self, *, hung: bool = True) -> None:
        """End all faults. `hung`: a hanging worker is killed by hand. Where every deadline has passed, the instance must have
        noticed."""
        self._replaces_worker = True
        self.network.heal()
        self.process.heal()
        if self.cache is not None:
            self.cache.heal()
        if hung and self.instance.worker.state.value == "ready" and self.process.epoch == NO_EPOCH:
            self.process.epoch = self.instance.worker.epoch
            self.process.crash("at last", "killed")
        self._replace_worker()
        if self.instance.worker.state.value == "asleep":
            self.dispatch(Wake(0))
        self.dispatch(Resume())

    def _replace_worker(self, _: None = None) -> None:
        if self.instance.worker.state.value == "gone" and not self.dead:
            self.process.replace(self.instance.worker.epoch)

    # The instance

    def receive(self, event: Event) -> None:
        """Receive an event of the worker process or the cache service."""
        if self.dead:
            return
        if not self.frozen:
            self.dispatch(event)
        elif not self._owner.defer(event):
            self._inbox.append(event)

    def dispatch(self, event: Event, at_least: float = 0.0) -> None:
        instance, owner, watch = self.instance, self._owner, self._watch
        now = Instant(max(self.clock.now(), at_least))
        self._latest_time = max(self._latest_time, now)
        watch.before(event, now)
        if self.cache is not None:
            self.cache.received(event)
        effects = instance.handle(event, now)
        changed = False
        if type(event) is WorkerReady:
            changed = self.was_ready and event.fingerprint != self.identity
            self.was_ready, self.identity = True, event.fingerprint
        watch.handled(event, effects)
        outward: list[Outward] = []
        for effect in sorted(effects, key=_clients_first):
            self._perform(effect, outward)
        watch.after()
        if self.cache is not None:
            self.tiers.after()
        if self._replaces_worker and instance.worker.state.value == "gone":  # poison is not healed
            self._timeline.at(self._timeline.now + REPLACED_SECONDS, self._replace_worker)
        self._arm()
        if outward:
            owner.gets(outward)
        if changed:
            owner.has_other_weights()

    def _perform(self, effect: Effect, outward: list[Outward]) -> None:
        self._timeline.record(effect.plan if type(effect) is RunStep else effect)
        self._watch.performs(effect)
        self._owner.performs(effect)
        match effect:
            case RunStep(plan):
                self.plans.check(plan)
                self.network.send_plan(plan)
            case Emit() | Refuse() | Reserved() | Offer() | Release() | Released() | Adopted() | ModeChanged():
                outward.append(effect)
            case RestartWorker():
                if effect.cause == "protocol":
                    if not self._broken and not self.process.broke_protocol:
                        raise InvariantBroken(f"a worker that kept to the protocol is restarted: {effect.reason}", invariant=46)
                    self.process.scribble()
                self._probe, self.worker_fault, self._idle_hang_at = IdleProbe(), "", None
                self.process.restart(effect)
            case StopWorker():
                self.process.stop()
                self._idle_hang_at = None
                self._timeline.at(self._timeline.now + STOP_SECONDS, self._worker_stopped)
            case SendToCache(message) if self.cache is not None:
                ready = self.instance.worker.state.value == "ready"
                self.tiers.sent(message, self._latest_time, worker_ready=ready)
                self.cache.take(message)
            case RestartCache() if self.cache is not None:
                self.cache.restart(excused=self.clock.jumped_ahead)

    def _worker_stopped(self, _: None) -> None:
        self.receive(WorkerStopped())

    def _receive(self, result: StepResult) -> None:
        if self.dead:
            return
        self.results += 1
        self._timeline.record(result)
        broken = self.network.is_broken(result)
        self._broken |= broken
        self.plans.received(result)
        self._watch.receives(result, broken=broken)
        self.dispatch(StepDone(self.network.unpack(result)))
        self._watch.received(result, broken=broken)

    # Time

    def freeze(self, until: float) -> None:
        self.frozen = True
        self.network.freeze(until)

    def thaw(self) -> None:
        """Handle the events that came meanwhile, then arm the timer."""
        if self._idle_hang_at is not None:
            self._idle_hang_at = self._timeline.now  # it could not be noticed before
        self.frozen = False
        self.network.freeze(None)
        inbox, self._inbox = self._inbox, []
        for event in inbox:
            self.dispatch(event)
        self._armed = None
        self._timeline.at(self._timeline.now, self._rearm)

    def _rearm(self, _: None) -> None:
        if not self.dead:
            self._arm()

    def _rearm_now(self) -> None:
        self._armed = None
        self._arm()

    def _arm(self) -> None:
        deadline = self.instance.next_deadline()
        if deadline is None:
            return
        due = max(self._timeline.now, self.clock.virtual(deadline))
        if self._armed is None or due < self._armed:
            self._armed = due
            self._timeline.at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        if self._armed != due or self.frozen or self.dead:
            return
        self._armed = None
        deadline = self.instance.next_deadline()
        if deadline is None:
            return
        if self.clock.virtual(deadline) <= self._timeline.now + 1e-9:
            self.dispatch(Tick(), at_least=deadline)
            armed = self.instance.next_deadline()
            if armed is not None and armed <= deadline:
                raise InvariantBroken(f"{self._name}: a deadline that is over is still armed", invariant=35)
        else:
            self._arm()

    def jump(self, seconds: float) -> None:
        """Set the instance's clock, ahead or back."""
        self.clock.jump(seconds)
        self._rearm_now()

    # Faults

    def kill_worker(self) -> None:
        if self.process.epoch == self.instance.worker.epoch and self.instance.worker.state.value == "ready":
            self.process.crash("from outside", "killed")

    def hang_worker(self) -> None:
        """Stop the worker without a message."""
        if self.process.epoch == self.instance.worker.epoch:
            self._onlooker.saw("the worker hung")
            self.process.hang()
            idle = self.instance.worker.state.value == "ready" and not self.instance.in_flight
            self._idle_hang_at = self._timeline.now if idle else None

    def freeze_worker(self, seconds: float) -> None:
        if self.process.epoch == self.instance.worker.epoch:
            self._onlooker.saw("a worker froze")
            self.process.freeze(seconds)

    # Queries

    def is_stalled_now(self) -> bool:
        """Whether the worker is stalled though there is work. Called with every heartbeat (runtime/engine/worker_health.py)."""
        now = self.clock.now()
        self._progress_count += self.process.computes
        ready = self.instance.worker.state.value == "ready"
        self._progress.observe(self._progress_count, ready and bool(self.instance.in_flight), now)
        return self._progress.stalled_seconds(now) > 0

    def probe_worker(self) -> None:
        """Ping an idle worker, and report one that hangs: before every heartbeat (runtime/engine/worker_supervisor.py)."""
        now, worker = self.clock.now(), self.instance.worker
        idle = worker.state.value == "ready" and not self.instance.in_flight
        self.worker_fault = self._probe.observe(now, idle=idle, ask=self._ping)
        if self._probe.silent_seconds(now) > self.instance.config.scheduler.step_seconds_max:
            self._onlooker.saw("an idle worker was silent for too long")
            self._probe, self.worker_fault = IdleProbe(), ""
            self.dispatch(WorkerSilent(worker.epoch))
        self._check_idle_hang()

    def _check_idle_hang(self) -> None:
        """77: a worker that hangs without work is replaced, though no request comes."""
        if self.instance.in_flight:
            self._idle_hang_at = None  # the deadline of a step is another check's
        elif self._idle_hang_at is not None:
            waited = self._timeline.now - self._idle_hang_at
            if waited > self.instance.config.scheduler.step_seconds_max + NOTICE_SECONDS:
                raise InvariantBroken(f"{self._name}: the worker hangs without work for {waited:.1f} s", invariant=77)

    def _ping(self) -> None:
        self._timeline.at(self._timeline.now + PONG_SECONDS, self._pong, (self.instance.worker.epoch, self._probe))

    def _pong(self, entry: tuple[WorkerEpoch, IdleProbe]) -> None:
        """The worker answers, unless it hangs; a frozen one when it continues."""
        epoch, probe = entry
        if epoch == self.process.epoch and (until := self.process.frozen_until) > self._timeline.now:
            self._timeline.at(until, self._pong, entry)
        elif self.process.answers_ping(epoch):
            probe.answered(self.clock.now())

    @property
    def is_drained(self) -> bool:
        instance = self.instance
        if self.cache is not None and self.cache.is_being_killed:  # pending calls end with the service
            return False
        return instance.mode.value == "paused" and not any(instance.view.load()[2:]) and instance.next_deadline() is None

    def ask(self, event: Submit | Reserve | Prefill) -> None:
        """34: a request keeps the queue position of its first attempt. 49: a replay does not count against the queue."""
        request, view = event.request, self.instance.view
        before = {sequence.attempt for sequence in view.sequences(request.id)}
        room = self._room_for(request) if type(event) is Reserve else None
        order = self._order_of(request)
        self.dispatch(event)
        if room is not None:
            room.observe()
        for sequence in view.sequences(request.id):
            if sequence.attempt != request.attempt or sequence.attempt in before:
                continue
            if sequence.order[0] != order[0] or abs(sequence.order[1] - order[1]) > TIME_MARGIN:
                raise InvariantBroken(f"{self._name}: {sequence!r} has the place {sequence.order}, not {order}", invariant=34)
            if sequence.queued and request.attempt > 1:
                raise InvariantBroken(f"{self._name}: {sequence!r} is a replay, and is queued", invariant=49)

    def _order_of(self, request: GenerateRequest) -> tuple[int, float]:
        return request.priority if self._by_priority else 0, self.clock.now() - request.age_seconds

    def _room_for(self, request: GenerateRequest) -> RoomWatch:
        """Number of blocks available now, and of those promised to others."""
        order = self._order_of(request)
        return RoomWatch(self.instance.view, request.id, order, self._block_size, cached=self._shares)

    def full_check(self) -> None:
        """12: each block in the device's cache holds the content of its key."""
        self.instance.check()
        self._watch.full_check()
        # The instance may not know yet that its worker died, and the memory with it.
        if self.instance.worker.state.value == "ready" and self.process.epoch == self.instance.worker.epoch:
            memory = self.process.worker.pool
            for key, block in self.instance.view.device_index().items():
                if self._shares and self._contents.of(key) != bytes(memory[block]):
                    raise InvariantBroken(f"{self._name}: block {block} does not hold what its key says", invariant=12)
        if self.cache is not None:
            self.cache.full_check()

    def at_rest(self) -> None:
        """9: nothing is held and no deadline is armed."""
        load = self.instance.view.load()
        if any(load[2:]):
            raise InvariantBroken(f"{self._name} at rest: {load}", invariant=9)
        if self.instance.next_deadline() is not None:
            raise InvariantBroken(f"{self._name} at rest, and a deadline is armed", invariant=9)
        check_rest(self.instance)
        self.process.at_rest()
        self.full_check()

    def note_copies(self) -> None:
        """Report rare states of the lower tiers to the campaign."""
        if self.cache is not None:
            self.cache.report_rare_states(self.instance.view.tier_stats)


def _clients_first(effect: Effect) -> bool:
    """Sort key of effects: deliveries first, since a plan must agree with what clients have been given. A change of the mode
    keeps its place before or after them: routers read ends of an instance that drains as no loss."""
    return type(effect) not in (Emit, ModeChanged)


def config_of(scenario: Scenario, role: InstanceRole) -> InstanceConfig:
    config = scenario.config()
    return replace(config, tiers=replace(config.tiers, peers=role != "mixed"))
