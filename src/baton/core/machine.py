"""A machine: events in, effects out. Time and chance are arguments; order comes from counters.

`runtime/driver.py` runs any machine on a real loop, `sim/world.py` the very same machine in virtual time.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from baton.protocol.ids import Instant

EventT = TypeVar("EventT", contravariant=True)
EffectT = TypeVar("EffectT")


class Machine(Protocol[EventT, EffectT]):
    def handle(self, event: EventT, now: Instant) -> list[EffectT]:
        """Change the state by one event and return the effects to perform. The call never waits and never fails half-way."""

    def next_deadline(self) -> Instant | None:
        """Time at which to call `handle(Tick(), now)` at the latest. The property only reads."""

    def check(self) -> None:
        """Verify the conservation laws from scratch; raises InvariantBroken. The simulator calls it often, production when
        idle."""
