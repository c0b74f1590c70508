"""Virtual time: one heap of future actions, ordered by (time, counter), and the digest of all messages.

Every actor of a world shares one `Timeline`. An actor is a plain class that

- is created by the world (world.py) with the timeline and the actors that it calls,
- puts its first entries on the heap in `begin`, and every later one while it handles an earlier one,
- acts only in functions that the heap or another actor calls, and reads no clock but `timeline.now`,
- passes messages to another process to `timeline.record`, so that the digest covers them, and texts for a trace to
  `timeline.note`,
- stops misbehaving in `heal`, and raises in `at_rest` if something is left of it.

Actors today: clients (clients.py), instances (instance.py), their engines (engine.py), worker processes (process.py), networks
(network.py), cache services (cache.py), routers and fronts (cluster/). A new actor is one more class, created by its world
(world.py, linked_world.py). Its faults are data: a kind of `StepFault`, `Nudge` or `ClusterFault` (scenario.py), which the
generators draw.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

import msgspec

from baton.errors import InvariantBroken

_ENCODE = msgspec.msgpack.Encoder().encode
_PACK_TIME = struct.Struct("<d").pack

EVENTS_MAX = 400_000
"""Maximum of entries per run. 35: a run with more makes no progress."""


class Timeline:
    events_max = EVENTS_MAX

    def __init__(self, note: Callable[[float, str, str], None] | None = None) -> None:
        self.now = 0.0
        self.heap_events = 0
        "Number of entries that were taken from the heap."
        self.traced = note is not None
        "Whether a tracer reads the notes. Costly texts are built only then."
        self._note = note
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._digest = blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def at(self, time: float, action: Callable[[Any], None], argument: Any = None) -> None:
        """Schedule a call at that time, after everything that is due then already. A past time means now."""
        heappush(self._heap, (max(time, self.now), next(self._order), action, argument))

    def withdraw(self, action: Callable[[Any], None]) -> list[tuple[float, Any]]:
        """Remove every entry of this action from the heap. Returns (time, argument), in order."""
        found = sorted(entry for entry in self._heap if entry[2] == action)
        if found:
            self._heap = [entry for entry in self._heap if entry[2] != action]
            heapify(self._heap)
        return [(time, argument) for time, _, _, argument in found]

    def run_until(self, condition: Callable[[], bool], limit: float, after_each: Callable[[], None]) -> bool:
        """Run until the condition holds. False: it does not by `limit`, or the heap is empty. Raises after `events_max`."""
        digest, heap = self._digest.update, self._heap
        while not condition():
            if not heap or heap[0][0] > limit:
                return False
            self.now, _, action, argument = heappop(heap)
            self.heap_events += 1
            digest(_PACK_TIME(self.now))
            action(argument)
            after_each()
            heap = self._heap
            if self.heap_events > self.events_max:
                raise InvariantBroken(f"not over after {self.events_max} events", invariant=35)
        return True

    def record(self, message: Any) -> None:
        """Add a message to the digest."""
        self._digest.update(_ENCODE(message))

    def note(self, actor: str, text: str) -> None:
        if self._note is not None:
            self._note(self.now, actor, text)
