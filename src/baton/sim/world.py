"""A world: the actors of a scenario on one timeline. Chaos, heal, fresh requests, drain, rest.

`PlainWorld` is one instance whose clients speak to it. Several behind routers, or one behind the front of `baton serve`, are in
linked_world.py. An *event* of a run is one thing that happens to one party, each of them checked: a submission, an abort, a
timer, a fault, a plan executed, a row of it, a result taken in, a token or an end that reaches its client. `heap_events` counts
the entries of the timeline alone. How an actor is added: timeline.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.core.events import Pause
from baton.core.instance import Instance
from baton.errors import InvariantBroken
from baton.sim.clients import Clients
from baton.sim.clock import Clock
from baton.sim.direct_clients import DirectClients
from baton.sim.engine import SimulatedEngine
from baton.sim.instance import SimulatedInstance
from baton.sim.instance_watch import InstanceWatch
from baton.sim.nudges import nudge
from baton.sim.outcome import Outcome as Outcome
from baton.sim.scenario import Client, InstanceSpec, Nudge, Scenario
from baton.sim.simulated_request import SimulatedRequest
from baton.sim.tier_outcomes import RepeatedPrompt, check_tier_outcomes
from baton.sim.tiers_watch import KeyContents
from baton.sim.timeline import Timeline
from baton.sim.watch import Watch

HEALED_EVENTS_MAX = 200
"""Maximum of events after healing. 35: more than three small requests need on a healthy instance."""
DRAIN_SECONDS_MAX = 60.0
NEVER = float("inf")
CIRCUIT_SECONDS_MAX = 61.0
"""Longest time in seconds for which a circuit keeps storage from being called, and a little more."""


class Tracer(Protocol):
    """Observer that sees everything and changes nothing (trace.py)."""

    def note(self, now: float, actor: str, text: str) -> None: ...
    def after(self, now: float, world: PlainWorld) -> None: ...


class World:
    """A scenario on a timeline. Subclasses name the actors, and decide when a phase of the run ends."""

    timeline_type: type[Timeline] = Timeline
    full_check_every = 128
    "Events between two full scans."
    watch: Watch
    clients: Clients

    def __init__(self, scenario: Scenario, tracer: Tracer | None = None) -> None:
        self.scenario = scenario
        self.timeline = self.timeline_type(tracer.note if tracer is not None else None)
        self.instances: list[SimulatedInstance] = []
        self._engines: list[SimulatedEngine] = []
        self._next_full_check = self.full_check_every

    @property
    def events(self) -> int:
        """Number of checked events (`Campaign.events`)."""
        engines = sum(engine.results + engine.plans.rows for engine in self._engines)
        return self.timeline.heap_events + engines + self.clients.deliveries

    def run(self) -> Outcome:
        invariant, violation = None, ""
        try:
            self._play()
        except InvariantBroken as broken:
            invariant, violation = broken.invariant, str(broken)
        except Exception as error:  # a crash of the core counts as a finding too
            invariant, violation = 0, f"{type(error).__name__}: {error}"
        return Outcome(
            seed=self.scenario.seed,
            events=self.events,
            requests=len(self.scenario.clients),
            tokens=self.clients.tokens,
            virtual_seconds=self.timeline.now,
            digest=self.timeline.digest,
            sometimes=self.watch.sometimes,
            invariant=invariant,
            violation=violation,
            heap_events=self.timeline.heap_events,
            faults=self.watch.faults.kinds,
        )

    def _play(self) -> None:
        self._chaos()
        self.timeline.note("world", "healed")
        self._heal()
        self.clients.check_fresh()
        self.timeline.note("world", "drain")
        for instance in self.instances:
            if instance.engine is not None:
                instance.engine.dispatch(Pause())
        self._must(self._drained, DRAIN_SECONDS_MAX, "at rest")
        self._rest()

    def _chaos(self) -> None:
        raise NotImplementedError

    def _heal(self) -> None:
        """35: after healing every request is answered soon."""
        raise NotImplementedError

    def _drained(self) -> bool:
        return all(instance.is_drained for instance in self.instances)

    def _rest(self) -> None:
        """9: at rest nothing is held, and every request was answered."""
        self.clients.at_rest()
        for instance in self.instances:
            instance.at_rest()
            if instance.engine is not None:
                instance.engine.note_copies()

    def _must(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        if not self._run(condition, self.timeline.now + seconds):
            raise self._late(seconds, what)

    def _late(self, seconds: float, what: str) -> InvariantBroken:
        open_ = f": {', '.join(self.clients.unanswered()[:5])}" if self.clients.open else ""
        return InvariantBroken(f"not {what} within {seconds:.0f} s{open_}", invariant=35)

    def _run(self, condition: Callable[[], bool], limit: float) -> bool:
        return self.timeline.run_until(condition, limit, self._after_each)

    def _after_each(self) -> None:
        if self.timeline.heap_events >= self._next_full_check:
            self._next_full_check = self.timeline.heap_events + self.full_check_every
            self._full_check()

    def _full_check(self) -> None:
        for instance in self.instances:
            instance.full_check()


class PlainWorld(World):
    """The world of a plain instance: a cluster without a router."""

    full_check_every = 64

    def __init__(self, scenario: Scenario, tracer: Tracer | None = None) -> None:
        super().__init__(scenario, tracer)
        self.machine = Instance(scenario.config())
        self.watch: InstanceWatch = InstanceWatch(scenario, self.timeline, self.machine)
        spec = InstanceSpec("mixed", scenario.blocks, scenario.slots, scenario.tokens_per_step)
        self.instance = SimulatedInstance(0, spec, self.timeline, self.watch, self._engine, "instance")
        self.instances = [self.instance]
        self.clients: DirectClients = DirectClients(scenario, self.timeline, self.watch, self.instance)
        self.watch.clients = self.clients
        self.engine = self._engine(self.instance)
        if tracer is not None:
            self.watch.on_event = lambda: tracer.after(self.timeline.now, self)

    def _engine(self, instance: SimulatedInstance) -> SimulatedEngine:
        """The only life of the instance's engine."""
        if self._engines:
            return self._engines[0]
        scenario, watch = self.scenario, self.watch
        engine = SimulatedEngine(
            "", "mixed", scenario, self.timeline, Clock(self.timeline, scenario.seed, 0, skewed=False), self.machine, instance,
            watch, watch.plans, watch, KeyContents(scenario.block_size, watch.all_requests), lambda: instance.weights,
        )  # fmt: skip
        watch.network = engine.network
        self._engines.append(engine)
        return engine

    def _chaos(self) -> None:
        self.instance.start()
        self.clients.begin()
        for each in self.scenario.nudges:
            self.timeline.at(each.at, self._nudge, each)
        self._until_quiet()
        self.engine.tiers.quiet()

    def _nudge(self, each: Nudge) -> None:
        self.timeline.note("world", f"{each.kind} {each.amount:.2f}")
        self.watch.happened(each.kind)
        if not nudge(self.instance, each, self.watch):
            # the engine finds the request when it reads again
            self.timeline.at(self.instance.frozen_until or 0.0, self._nudge, each)

    def _heal(self) -> None:
        """A gone worker is replaced by hand, and the instance is resumed."""
        if self.machine.worker.state.value == "gone":
            self.watch.reference.replaced()
        self.engine.heal(hung=False)
        self._until_quiet()
        begun = self.timeline.heap_events + self.engine.results
        self.clients.heal()
        self._until_quiet()
        took = self.timeline.heap_events + self.engine.results - begun
        if took > HEALED_EVENTS_MAX:
            raise InvariantBroken(f"three small requests took {took} events", invariant=35)
        self._close_circuits()
        self._check_tiers()

    def _check_tiers(self) -> None:
        """Check 65, and then 74, whose requests cause copies and queries themselves."""
        self.engine.note_copies()
        check_tier_outcomes(self.scenario, self.watch.all_requests, self.machine, self.engine.tiers.queries)
        if self.scenario.host_blocks and self.scenario.blocks > 1:
            RepeatedPrompt(self.scenario, self.engine, self.instance.loaded, self._ask).check()

    def _ask(self, client: Client) -> SimulatedRequest:
        """Submit a request of its own, and run everything that follows from it."""
        request = self.clients.ask_fresh(client, 0)
        self._until_quiet()
        return request

    def _close_circuits(self) -> None:
        """68: storage answers again, so that a circuit that has opened closes within its longest wait, when storage is called.
        Each request has keys of its own, which no tier has. A store that was slow is tried again now and then only."""
        for number in range(self.machine.config.tiers.load_again_after + 2):
            if not self._open_circuits():
                return
            self.watch.saw("a circuit was open after healing")
            self.timeline.at(self.timeline.now + CIRCUIT_SECONDS_MAX, lambda _: None)
            self._until_quiet()
            prompt, name = [1] * (self.scenario.block_size + 1), f"probe{number}"
            self._ask(Client(name, self.timeline.now, prompt, 1, salt=name))
        raise InvariantBroken(f"storage answers, and its circuit stays open for {self._open_circuits()}", invariant=68)

    def _open_circuits(self) -> list[str]:
        """Circuits that are not closed, of those that every computed prompt uses."""
        if self.scenario.blocks < 2:  # no prompt has a block that storage may have
            return []
        used = ("read", "write") if self.scenario.write == "through" else ("read",)
        return [way for way, state in self.machine.view.circuits().items() if state != "closed" and way in used]

    def _drained(self) -> bool:
        """Always False: this world runs until the heap is empty, and `at_rest` checks what is left."""
        return False

    def _must(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        self._until_quiet()

    def _until_quiet(self) -> None:
        self._run(lambda: False, NEVER)

    def _rest(self) -> None:
        if self.engine.cache is not None:
            self.engine.cache.at_rest()
        self.instance.full_check()
        self.instance.at_rest()
        self.clients.at_rest()
        self.watch.at_rest()

    def _after_each(self) -> None:
        if self.events >= self._next_full_check:  # a scan on_event at each open request
            self._full_check()
            self._next_full_check = self.events + max(self.full_check_every, self.machine.view.open_requests)
