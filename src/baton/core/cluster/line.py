"""The router's line: ordered by priority, then arrival. A request that comes back is at its old place.

Bounded in sequences and prompt tokens, for those that come. One that comes back is never turned away; it counts, so that
newcomers wait outside for as long as it takes.
"""

from __future__ import annotations

from heapq import heappop, heappush

from baton.config import RouterConfig
from baton.core.cluster.trip import Order, Trip
from baton.core.handoff.table import TripState
from baton.protocol.request import GenerateRequest, Refused


class Line:
    __slots__ = ("_config", "_heap", "_trips", "sequences", "tokens")

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._trips: dict[Order, Trip] = {}
        "By their order, which nobody else has."
        self._heap: list[Order] = []
        "May name some that have left."
        self.sequences = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._trips)

    def trips(self) -> list[Trip]:
        return list(self._trips.values())

    def refusal(self, request: GenerateRequest) -> Refused | None:
        """Why there is no room for a newcomer."""
        config = self._config
        sequences = len(request.wanted)
        tokens = sequences * len(request.prompt)
        if sequences > config.queue_requests_max:
            return Refused("never_queued", sequences, config.queue_requests_max)
        if tokens > config.queue_tokens_max:
            return Refused("never_queued", tokens, config.queue_tokens_max)
        if self.sequences + sequences > config.queue_requests_max:
            return Refused("queue_full", self.sequences + sequences, config.queue_requests_max)
        if self.tokens + tokens > config.queue_tokens_max:
            return Refused("queue_tokens_full", self.tokens + tokens, config.queue_tokens_max)
        return None

    def join(self, trip: Trip) -> None:
        self._trips[trip.order] = trip
        heappush(self._heap, trip.order)
        self._count(trip, 1)

    def leave(self, trip: Trip) -> None:
        del self._trips[trip.order]
        self._count(trip, -1)
        if len(self._heap) > 2 * len(self._trips) + 64:
            self._heap = sorted(self._trips)

    def resize(self, trip: Trip, sequences: int) -> None:
        """So many of its sequences have ended while it waits."""
        self.sequences -= sequences
        self.tokens -= sequences * len(trip.request.prompt)

    def head(self) -> Trip | None:
        while self._heap and self._heap[0] not in self._trips:
            heappop(self._heap)
        return self._trips[self._heap[0]] if self._heap else None

    def set_aside(self, trip: Trip) -> None:
        """The head: look at the next one. Until `put_back` it is in line, but not looked at."""
        while self._heap and self._heap[0] == trip.order:
            heappop(self._heap)

    def put_back(self, trips: list[Trip]) -> None:
        for trip in trips:
            heappush(self._heap, trip.order)

    def _count(self, trip: Trip, sign: int) -> None:
        self.sequences += sign * len(trip.open)
        self.tokens += sign * len(trip.open) * len(trip.request.prompt)

    def check(self) -> list[str]:
        """What is wrong."""
        wrong = [f"{trip!r} is in line" for trip in self._trips.values() if trip.state is not TripState.QUEUED]
        sequences = sum(len(trip.open) for trip in self._trips.values())
        tokens = sum(len(trip.open) * len(trip.request.prompt) for trip in self._trips.values())
        if (sequences, tokens) != (self.sequences, self.tokens):
            wrong.append(f"{sequences} sequences and {tokens} tokens wait, {self.sequences} and {self.tokens} are counted")
        first = sum(len(trip.open) for trip in self._trips.values() if trip.first)
        if first > self._config.queue_requests_max:
            wrong.append(f"{first} sequences wait")
        missing = sum(order not in self._heap for order in self._trips)
        if missing:
            wrong.append(f"{missing} trips are never looked at")
        return wrong
