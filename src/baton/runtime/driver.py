"""Runs a machine on a real loop: events in, effects to their ports, one timer for the next deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from baton.core.machine import Machine
from baton.protocol.ids import Instant

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")


class Driver(Generic[EventT, EffectT]):
    """Runs a machine: dispatches events and performs effects through ports, plain functions that start something and return;
    its result is dispatched as an event later.

    `due` is called when a deadline of the machine has passed: it dispatches to the machine, and handles errors (the loop would
    only log them).
    """

    def __init__(
        self,
        machine: Machine[EventT, EffectT],
        ports: Mapping[type[Any], Callable[[Any], None]],
        due: Callable[[], None],
    ) -> None:
        self.machine = machine
        self._ports = ports
        self._due = due
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._armed: Instant | None = None

    def dispatch(self, event: EventT) -> None:
        """Handle an event and perform the effects, as `decide` and `carry_out` without their calls: an engine dispatches here
        with every step."""
        for effect in self.machine.handle(event, Instant(self._loop.time())):
            self._ports[type(effect)](effect)
        self._arm()

    def decide(self, event: EventT) -> Sequence[EffectT]:
        """Return the machine's effects without performing them. Errors concern either the event or the machine's own state."""
        return self.machine.handle(event, Instant(self._loop.time()))

    def carry_out(self, effects: Sequence[EffectT]) -> None:
        for effect in effects:
            self._ports[type(effect)](effect)
        self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        """Set the timer. An earlier timer is kept: if it fires too early no deadline has passed, and it is set again."""
        deadline = self.machine.next_deadline()
        if deadline is None or (self._armed is not None and self._armed <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed = deadline
        self._timer = self._loop.call_at(deadline, self._fire)

    def _fire(self) -> None:
        """Handle unread events first: after a pause of the whole process the awaited ones may be among them."""
        self._timer = self._loop.call_soon(self._on_timer)

    def _on_timer(self) -> None:
        """Report a passed deadline of the machine, or set the timer again."""
        self._armed = self._timer = None
        deadline = self.machine.next_deadline()
        if deadline is not None and deadline <= self._loop.time():
            self._due()
        else:
            self._arm()
