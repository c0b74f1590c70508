"""A machine: facts in, effects out. Time and chance are arguments; order comes from counters.

`runtime/driver.py` runs any machine on a real loop, `sim/world.py` the very same machine in virtual time.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from baton.protocol.ids import Instant

EventT = TypeVar("EventT", contravariant=True)
EffectT = TypeVar("EffectT")


class Machine(Protocol[EventT, EffectT]):
    def handle(self, event: EventT, now: Instant) -> list[EffectT]:
        """Take in what happened, say what is to be done. Never waits, never fails half-way."""

    def next_deadline(self) -> Instant | None:
        """When to call `handle(Tick(), now)` at the latest. A question: reads, never writes."""

    def check(self) -> None:
        """Prove the conservation laws from scratch; raises InvariantBroken. In the rehearsal often, in production when
        idle."""
