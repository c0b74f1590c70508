"""Runs a machine on a real loop: events in, effects to their ports, one timer for the next deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from baton.core.machine import Machine
from baton.protocol.ids import Instant

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")


class Driver(Generic[EventT, EffectT]):
    """Ports are plain functions that start something and return; what comes of it is told as an event later."""

    def __init__(
        self, machine: Machine[EventT, EffectT], ports: Mapping[type[Any], Callable[[Any], None]], tick: EventT
    ) -> None:
        self.machine = machine
        self._ports = ports
        self._tick = tick
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._armed: Instant | None = None

    def tell(self, event: EventT) -> None:
        for effect in self.machine.handle(event, Instant(self._loop.time())):
            self._ports[type(effect)](effect)
        self._arm()

    def _arm(self) -> None:
        """A timer that fires too early finds nothing due and is set again; so one that is early enough is left alone."""
        deadline = self.machine.next_deadline()
        if deadline is None or (self._armed is not None and self._armed <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed = deadline
        self._timer = self._loop.call_at(deadline, self._fire)

    def _fire(self) -> None:
        self._armed = self._timer = None
        deadline = self.machine.next_deadline()
        if deadline is not None and deadline <= self._loop.time():
            self.tell(self._tick)
        else:
            self._arm()
