"""When to look at which trip: a heap whose outdated entries are skipped, never more than twice as many as trips."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from baton.core.cluster.trip import Trip
from baton.protocol.ids import Instant


class Alarms:
    __slots__ = ("_heap", "_numbers", "armed")

    def __init__(self) -> None:
        self._heap: list[tuple[Instant, int, Trip]] = []
        self._numbers = count()
        self.armed = 0
        "Trips that have an alarm."

    def set(self, trip: Trip, at: Instant) -> None:
        if trip.alarm == at:
            return
        self.armed += trip.alarm is None
        trip.alarm = at
        heappush(self._heap, (at, next(self._numbers), trip))
        self._sweep()

    def clear(self, trip: Trip) -> None:
        self.armed -= trip.alarm is not None
        trip.alarm = None
        self._sweep()

    def _sweep(self) -> None:
        if len(self._heap) > 2 * self.armed + 64:
            live = {entry[2].id: entry for entry in self._heap if entry[2].alarm == entry[0]}
            self._heap = list(live.values())
            heapify(self._heap)

    def due(self, now: Instant) -> list[Trip]:
        """Those whose time has come. They have no alarm until it is set again."""
        found: list[Trip] = []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].alarm != self._heap[0][0]):
            at, _, trip = heappop(self._heap)
            if trip.alarm == at:
                self.clear(trip)
                found.append(trip)
        return found

    def next_deadline(self) -> Instant | None:
        """Perhaps of an alarm that was put off. Then nothing is due, and the next one is asked for."""
        return self._heap[0][0] if self._heap else None
