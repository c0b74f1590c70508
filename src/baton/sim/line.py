"""Who waits, who is on the worker, and who comes first: worked out from what clients and worker are told, nothing else.

A leader waits from its submission on, its siblings from the leader's first token or end. Whoever is dropped and has not ended
waits again, at its old place, and may be admitted once the drop is acknowledged. A lost worker sends everybody back.

Two things cannot be known from outside: a suspect is held back until it is cleared (core/engine/recovery.py), and one whose
KV a lower tier has is out of line while that is loaded (loading.py). So the head of this line is asked for its phase.
"""

from __future__ import annotations

from heapq import heappop, heappush

from baton.core.engine.phase import Phase
from baton.errors import InvariantBroken
from baton.sim.trip import Order, Trip

Place = tuple[Trip, int]


class Line:
    def __init__(self) -> None:
        self.waiting: dict[Order, Place] = {}
        self.on_worker: dict[Order, Place] = {}
        self.dropped: dict[Order, int] = {}
        "Waiting again, and the step that drops them has no result yet."
        self._heap: list[Order] = []

    def joins(self, trip: Trip, index: int) -> None:
        order = trip.orders[index]
        self.waiting[order] = trip, index
        heappush(self._heap, order)

    def siblings_join(self, trip: Trip) -> None:
        if not trip.siblings_wait:
            trip.siblings_wait = True
            for index in range(1, trip.client.n):
                if trip.ended[index] is None:
                    self.joins(trip, index)

    def head(self) -> Place | None:
        """The first that waits for nothing but its turn."""
        aside: list[Order] = []
        place = None
        while self._heap and place is None:
            order = self._heap[0]
            found = self.waiting.get(order)
            if found is None:
                heappop(self._heap)
            elif order in self.dropped or _is_held(*found):
                aside.append(heappop(self._heap))
            else:
                place = found
        for order in aside:
            heappush(self._heap, order)
        return place

    def admitted(self, trip: Trip, index: int) -> None:
        """34: only the head is, and not before one that was dropped and will be back in front of it."""
        order, head = trip.orders[index], self.head()
        if order not in self.waiting or order in self.dropped:
            raise InvariantBroken(f"{trip.name}.{index} is admitted, and is not in line", invariant=34)
        if head is not None and head[0].orders[head[1]] < order:
            raise InvariantBroken(f"{trip.name}.{index} overtook {head[0].name}.{head[1]}", invariant=34)
        if self.returns_before(order):
            raise InvariantBroken(f"{trip.name}.{index} overtook one that was preempted", invariant=34)
        self.on_worker[order] = self.waiting.pop(order)

    def returns_before(self, order: Order) -> bool:
        """Is one that was dropped, and is not back yet, more urgent?"""
        return any(dropped < order for dropped in self.dropped)

    def is_dropped(self, trip: Trip, index: int, step: int) -> None:
        """By this step, and it has not ended."""
        order = trip.orders[index]
        del self.on_worker[order]
        self.dropped[order] = step
        self.joins(trip, index)

    def absorbed(self, step: int) -> None:
        """Its drops are acknowledged."""
        if self.dropped:
            self.dropped = {order: dropped_by for order, dropped_by in self.dropped.items() if dropped_by > step}

    def ended(self, trip: Trip, index: int) -> None:
        order = trip.orders[index]
        for places in (self.waiting, self.on_worker, self.dropped):
            places.pop(order, None)
        if index == 0:
            self.siblings_join(trip)

    def worker_lost(self) -> None:
        self.dropped.clear()
        for trip, index in list(self.on_worker.values()):
            self.joins(trip, index)
        self.on_worker.clear()


def _is_held(trip: Trip, index: int) -> bool:
    return trip.sequences[index].phase in (Phase.HELD, Phase.LOADING)
