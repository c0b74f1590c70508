"""An instance of the simulator: engine processes, one life after the other, that freeze, drain, die and restart.

Each life has a machine of its own (engine.py). Routers and fronts talk to an instance through its links (cluster/links.py); a
plain instance has none, and its clients talk to the engine directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.core.effects import Effect
from baton.core.events import Event, EvictSome, Pause, PreemptSome, Resume, Sleep, Wake
from baton.errors import InvariantBroken
from baton.sim.engine import Outward, SimulatedEngine
from baton.sim.process import NO_EPOCH
from baton.sim.scenario import InstanceSpec
from baton.sim.timeline import Timeline
from baton.sim.watch import Watch


class Links(Protocol):
    """Interface of an instance's sessions with its routers or its front."""

    def begin(self, engine: SimulatedEngine) -> None: ...
    def close(self) -> bool:
        """Close all sessions: the engine is dead. Returns whether a router had accepted it."""

    def thaw(self, engine: SimulatedEngine) -> None: ...
    def performs(self, effect: Effect) -> None: ...
    def gets(self, effects: list[Outward]) -> None: ...
    def has_other_weights(self) -> None: ...


class Drain:
    """The time from an order to sleep until the instance serves again."""

    __slots__ = ("deadline", "end")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        "Requests that are open then are ended."
        self.end = float("inf")


class SimulatedInstance:
    def __init__(
        self,
        number: int,
        spec: InstanceSpec,
        timeline: Timeline,
        watch: Watch,
        start: Callable[[SimulatedInstance], SimulatedEngine],
        name: str,
        kind: int | None = None,
    ) -> None:
        """`kind`: the instance of the scenario that a stray is like."""
        self.number = number
        self.name = name
        self.kind = number if kind is None else kind
        self.weights = 0
        "Weights in the model's files at present."
        self.spec = spec
        self.role = spec.role
        self.engine: SimulatedEngine | None = None
        self.lives = 0
        self.links: Links | None = None
        self.frozen_until: float | None = None
        "Time until which the engine process is frozen; messages to it wait."
        self._timeline = timeline
        self._watch = watch
        self._start_engine = start
        self._healed = False
        self._orders = 100
        "Number of the last order to sleep or to wake; those of other orders are smaller (nudges.py)."
        self.drains: list[Drain] = []
        "The orders to sleep."

    @property
    def address(self) -> str:
        """Address of this life's messenger."""
        return f"{self.name}{f'~{self.number}' if self.is_stray else ''}#{self.lives}"

    @property
    def is_stray(self) -> bool:
        return self.kind != self.number

    # Lives

    def start(self, _: None = None) -> None:
        if self.engine is None:
            self.lives += 1
            self.note(f"starts, life {self.lives}")
            self.engine = engine = self._start_engine(self)
            engine.begin()
            if self.links is not None:
                self.links.begin(engine)

    def kill(self, down_seconds: float | None) -> None:
        """Kill the engine, and start another after `down_seconds`. None: never."""
        if self.engine is None:
            return
        self.note("is killed")
        self._watch.saw("an engine was killed" if not self.is_stray else "a stray left")
        if self.frozen_until is not None:
            self._watch.saw("a frozen engine was killed")
        self.engine.die()
        self._end_drains()
        self.engine, self.frozen_until = None, None
        if self.links is not None and self.links.close():
            self._watch.happened("stray" if self.is_stray else "kill")
        if down_seconds is not None:
            self._timeline.at(self._timeline.now + down_seconds, self.start)

    def freeze(self, seconds: float) -> None:
        """Stop the engine process (SIGSTOP) for `seconds`. Then it reads its messages first, and its timer after them."""
        if self.engine is not None and self.frozen_until is None:
            self.note(f"freezes for {seconds:.2f} s")
            self._watch.saw("an engine froze")
            self.frozen_until = self._timeline.now + seconds
            self.engine.freeze(self.frozen_until)
            self._timeline.at(self.frozen_until, self._thaw, self.engine)

    def _thaw(self, engine: SimulatedEngine) -> None:
        if engine is self.engine and self.frozen_until is not None:
            self.note("goes on")
            self.frozen_until = None
            engine.thaw()
            if self.links is not None:
                self.links.thaw(engine)

    def drain(self, seconds: float) -> None:
        if self.engine is not None and self.frozen_until is None:
            self._watch.saw("an instance drained")
            self.engine.dispatch(Pause(seconds / 2))
            self._timeline.at(self._timeline.now + seconds, self._resume, self.engine)

    def _resume(self, engine: SimulatedEngine) -> None:
        if engine is self.engine and self.frozen_until is None and not self._healed:
            engine.dispatch(Resume())

    def sleep(self, seconds: float) -> None:
        """Drain, stop the worker, which frees weights and cache, and wake again."""
        if self.engine is not None and self.frozen_until is None:
            now = self._timeline.now
            self.drains.append(Drain(now + seconds / 4))
            self.engine.dispatch(Pause(seconds / 4))
            self._timeline.at(now + seconds / 2, self._sleep, self.engine)
            self._timeline.at(now + seconds, self._wake, self.engine)

    def _sleep(self, engine: SimulatedEngine) -> None:
        if self._reads_later(self._sleep, engine) or engine is not self.engine or self._healed:
            return
        engine.dispatch(Sleep(self._next_order()))
        if engine.instance.worker.state.value == "asleep":
            self._watch.saw("an instance slept")
        else:
            self._watch.saw("an order to sleep was refused")

    def _wake(self, engine: SimulatedEngine) -> None:
        if self._reads_later(self._wake, engine) or engine is not self.engine or self._healed:
            return
        engine.dispatch(Wake(self._next_order()))
        if engine.instance.worker.state.value == "asleep":
            self._watch.saw("an order to wake waited for the worker's end")
        engine.dispatch(Resume())
        self._end_drains()

    def _end_drains(self) -> None:
        for drain in self.drains:
            drain.end = min(drain.end, self._timeline.now)

    def _reads_later(self, order: Callable[[SimulatedEngine], None], engine: SimulatedEngine) -> bool:
        """Whether the engine is frozen: it finds the order when it reads again."""
        if self.frozen_until is None or engine is not self.engine:
            return False
        self._timeline.at(self.frozen_until, order, engine)
        return True

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders

    def press(self, kind: str, amount: int) -> None:
        if self.engine is not None and self.frozen_until is None:
            self.engine.dispatch(PreemptSome(amount) if kind == "preempt" else EvictSome(amount))

    def heal(self, weights: int) -> None:
        """Give the instance the weights of the others, as an operator would."""
        self._healed = True
        self.weights = weights
        if self.loaded != weights:
            self.kill(0.0)
        self.start()
        if self.engine is not None:
            self._thaw(self.engine)
            self.engine.heal(hung=self.links is None)  # a new life too: nothing goes wrong in it
            self._end_drains()

    # The engine's owner

    def performs(self, effect: Effect) -> None:
        if self.links is not None:
            self.links.performs(effect)

    def gets(self, effects: list[Outward]) -> None:
        if self.links is not None:
            self.links.gets(effects)

    def defer(self, event: Event) -> bool:
        """Queue an event of a frozen engine. Without links: deliver it when the engine thaws, in the order in which messages
        were sent."""
        if self.links is not None or self.frozen_until is None:
            return False
        self._timeline.at(self.frozen_until, self._receive, event)
        return True

    def _receive(self, event: Event) -> None:
        if self.engine is not None:
            self.engine.receive(event)

    def has_other_weights(self) -> None:
        if self.links is not None:
            self.links.has_other_weights()

    # Queries

    @property
    def loaded(self) -> int:
        """Weights of its worker, or of the next one."""
        return self.weights if self.engine is None else self.engine.process.worker.weights

    @property
    def is_ready(self) -> bool:
        return self.engine is not None and self.engine.instance.worker.state.value == "ready"

    @property
    def is_working(self) -> bool:
        """Whether no worker hangs and no step is awaited. A ready worker may hang, and its engine has not noticed yet."""
        engine = self.engine
        return self.is_ready and engine is not None and engine.process.epoch != NO_EPOCH and not engine.instance.in_flight

    @property
    def is_drained(self) -> bool:
        return self.engine is not None and self.engine.is_drained

    def full_check(self) -> None:
        if self.engine is not None:
            self.engine.full_check()

    def at_rest(self) -> None:
        if self.engine is None:
            raise InvariantBroken(f"{self.name} was never started again", invariant=35)
        self.engine.at_rest()

    def note(self, text: str) -> None:
        self._timeline.note(self.name, text)
