"""Alarms of routed requests: a heap whose outdated entries are skipped, never more than twice as many as routed requests."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from baton.core.cluster.routed_request import RoutedRequest
from baton.protocol.ids import Instant


class Alarms:
    __slots__ = ("_heap", "_numbers", "armed")

    def __init__(self) -> None:
        self._heap: list[tuple[Instant, int, RoutedRequest]] = []
        self._numbers = count()
        self.armed = 0
        "Routed requests that have an alarm."

    def set(self, routed: RoutedRequest, at: Instant) -> None:
        if routed.alarm == at:
            return
        self.armed += routed.alarm is None
        routed.alarm = at
        heappush(self._heap, (at, next(self._numbers), routed))
        self._sweep()

    def clear(self, routed: RoutedRequest) -> None:
        self.armed -= routed.alarm is not None
        routed.alarm = None
        self._sweep()

    def _sweep(self) -> None:
        if len(self._heap) > 2 * self.armed + 64:
            live = {entry[2].id: entry for entry in self._heap if entry[2].alarm == entry[0]}
            self._heap = list(live.values())
            heapify(self._heap)

    def due(self, now: Instant) -> list[RoutedRequest]:
        """Routed requests whose alarm has passed. They have no alarm until it is set again."""
        found: list[RoutedRequest] = []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].alarm != self._heap[0][0]):
            at, _, routed = heappop(self._heap)
            if routed.alarm == at:
                self.clear(routed)
                found.append(routed)
        return found

    def next_deadline(self) -> Instant | None:
        """Time of the earliest entry, perhaps of an alarm that was postponed. Then nothing is due, and the next one is returned
        later."""
        return self._heap[0][0] if self._heap else None
