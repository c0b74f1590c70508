"""The world: the actors of a scenario on one timeline. Chaos, heal, drain, rest.

An *event* of a run is one thing that happens to one party, each of them checked: a submission, an abort, a timer, a fault, a
plan executed, a row of it, a result taken in, a token or an end that reaches its client. `heap_events` counts the entries of
the timeline alone. How an actor is added: timeline.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.core.events import EvictSome, ForgetCache, Pause, PreemptSome, Resume
from baton.core.instance import Instance
from baton.errors import InvariantBroken
from baton.sim.clients import Clients
from baton.sim.node import Node
from baton.sim.outcome import Outcome as Outcome
from baton.sim.scenario import Nudge, Scenario
from baton.sim.timeline import Actor, Timeline
from baton.sim.watch import Watch

HEALED_EVENTS_MAX = 200
"""Invariant 35: more than three small requests need on a healthy instance."""
FULL_CHECK_EVERY = 64
"""Events between two full scans. As many as requests are open, if that is more: a scan looks at each of them."""


class Tracer(Protocol):
    """Sees everything; changes nothing (trace.py)."""

    def note(self, now: float, actor: str, text: str) -> None: ...
    def after(self, now: float, world: PlainWorld) -> None: ...


class World:
    """A scenario on a timeline. Subclasses say which actors there are and when a run ends."""

    timeline_type: type[Timeline] = Timeline

    def __init__(self, scenario: Scenario, note: Callable[[float, str, str], None] | None) -> None:
        self.scenario = scenario
        self.timeline = self.timeline_type(note)
        self.sometimes: dict[str, int] = {}
        "Rare states that were reached."

    @property
    def events(self) -> int:
        """Counted: see above."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Delivered to clients."""
        raise NotImplementedError

    def _play(self) -> None:
        raise NotImplementedError

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
            events=self.events,
            requests=len(self.scenario.clients),
            tokens=self.tokens,
            virtual_seconds=self.timeline.now,
            digest=self.timeline.digest,
            sometimes=self.sometimes,
            invariant=invariant,
            violation=violation,
            heap_events=self.timeline.heap_events,
        )


class PlainWorld(World):
    """One instance: a cluster without a router, whose clients speak to the engine directly."""

    def __init__(self, scenario: Scenario, tracer: Tracer | None = None) -> None:
        super().__init__(scenario, tracer.note if tracer is not None else None)
        self.instance = Instance(scenario.config())
        self.watch = Watch(scenario, self.instance)
        self.sometimes = self.watch.sometimes
        self.node = Node(scenario, self.timeline, self.instance, self.watch)
        self.clients = Clients(scenario, self.timeline, self.node)
        self.node.connect(self.clients, self._looked if tracer is not None else None)
        self.actors: tuple[Actor, ...] = (self.node, self.clients)
        self._tracer = tracer
        self._next_full_check = FULL_CHECK_EVERY

    @property
    def now(self) -> float:
        return self.timeline.now

    @property
    def tokens(self) -> int:
        return self.watch.tokens

    @property
    def events(self) -> int:
        return self.timeline.heap_events + self.node.results + self.watch.plans.rows + self.watch.deliveries

    # The run

    def _play(self) -> None:
        for actor in self.actors:
            actor.begin()
        for nudge in self.scenario.nudges:
            self.timeline.at(nudge.at, self._nudge, nudge)
        self._until_quiet()
        self.node.tiers.quiet()
        self._heal()
        self.timeline.note("world", "drain")
        self.node.dispatch(Pause())
        self._until_quiet()
        for actor in self.actors:
            actor.at_rest()

    def _heal(self) -> None:
        """Faults stop, what is broken is replaced by hand: fresh requests must succeed, and soon."""
        self.timeline.note("world", "healed: resume")
        self.node.heal()
        self._until_quiet()
        begun = self.timeline.heap_events + self.node.results
        self.clients.heal()
        self._until_quiet()
        self.clients.check_fresh()
        took = self.timeline.heap_events + self.node.results - begun
        if took > HEALED_EVENTS_MAX:
            raise InvariantBroken(f"three small requests took {took} events", invariant=35)

    def _until_quiet(self) -> None:
        self.timeline.run(self._after_each)

    def _after_each(self) -> None:
        if self.events >= self._next_full_check:
            self.node.full_check()
            self._next_full_check = self.events + max(FULL_CHECK_EVERY, self.instance.view.open_requests)

    def _looked(self) -> None:
        if self._tracer is not None:
            self._tracer.after(self.now, self)

    # What happens at a time

    def _nudge(self, nudge: Nudge) -> None:
        self.timeline.note("world", f"{nudge.kind} {nudge.amount:.2f}")
        node, amount = self.node, max(1, int(nudge.amount))
        if node.frozen_until is not None and nudge.kind in ("preempt", "evict", "clear", "clock", "pause", "resume"):
            self.timeline.at(node.frozen_until, self._nudge, nudge)  # the engine finds it when it reads again
            return
        match nudge.kind:
            case "preempt":
                self.watch.forced()
                node.dispatch(PreemptSome(amount))
            case "evict":
                node.dispatch(EvictSome(amount))
            case "clear" if node.cache is not None:
                node.dispatch(ForgetCache(0))
                if node.tiers.cleared():
                    node.cache.saw("the cache was cleared with copies under way")
            case "crash":
                node.kill_worker()
            case "reload":
                node.weights = int(nudge.amount)
                node.kill_worker()
            case "cache_crash" if node.cache is not None:
                node.cache.crash(kept=nudge.amount < 0.6)
            case "cache_hang" if node.cache is not None:
                node.cache.hang()
            case "clock":
                node.jump(nudge.amount)
            case "pause":
                node.dispatch(Pause(nudge.amount))
            case "resume":
                node.dispatch(Resume())
            case "restart_fails":
                node.process.fail_restarts(amount)
            case "restart_hangs":
                node.process.hang_restart()
            case "crash_loop":
                node.process.loop(amount)
            case "freeze":
                node.freeze(nudge.amount)
