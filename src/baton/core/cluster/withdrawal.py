"""The client wants no more of a request, or of one of its sequences: it is gone, saw a stop string, or its time is over.

    QUEUED, RESERVING, HANDING    the router tells the end at once: nobody else has more to say about it
    PREFILLING                    so too; but where the first token is out, its usage follows at once and is waited for
    SERVING                       home tells the end, with the usage

Whatever is waited for, is for `withdraw_seconds_max`; a loss of the instance ends it too.
"""

from __future__ import annotations

from baton.config import RouterConfig
from baton.core.cluster.coordinator import Coordinator
from baton.core.cluster.events import Tell
from baton.core.cluster.handoff_table import TripFact, TripState
from baton.core.cluster.trip import Trip
from baton.protocol.control import AbortRequest
from baton.protocol.ids import Instant
from baton.protocol.request import FinishReason


class Withdrawal:
    __slots__ = ("_config", "_coordinator")

    def __init__(self, config: RouterConfig, coordinator: Coordinator) -> None:
        self._config = config
        self._coordinator = coordinator

    def withdraw(self, trip: Trip, indices: list[int], reason: FinishReason) -> None:
        indices = [index for index in indices if index not in trip.withdrawn]
        if not indices:
            return
        if trip.state is TripState.SERVING:
            self._abort(trip, indices, reason)
            self._wait(trip, indices, reason)
        elif trip.state is TripState.PREFILLING and trip.leader in indices and self._usage_follows(trip):
            self._wait(trip, indices, reason)
        else:
            self.end(trip, [(index, reason) for index in indices])

    def end(self, trip: Trip, over: list[tuple[int, FinishReason]]) -> None:
        """The router tells these ends. What the hand-off was about is over with its leader."""
        coordinator, leader = self._coordinator, trip.leader
        coordinator.end(trip, over)
        if not trip.open:
            coordinator.advance(trip, TripFact.CLOSED)
        elif trip.state is TripState.QUEUED or trip.state is TripState.SERVING:
            coordinator.clocks.arm(trip)
        elif leader not in trip.open:
            coordinator.advance(trip, TripFact.LEADER_OVER)
        else:
            for index, reason in over:
                self._abort(trip, [index], reason)

    def lapse(self, trip: Trip) -> None:
        """Home has not told how they ended."""
        trip.withdraw_by = None
        self.end(trip, list(trip.withdrawn.items()))

    @staticmethod
    def _usage_follows(trip: Trip) -> bool:
        return trip.usage is None and len(trip.open[trip.leader]) > trip.base

    def _wait(self, trip: Trip, indices: list[int], reason: FinishReason) -> None:
        for index in indices:
            trip.withdrawn[index] = reason
        trip.withdraw_by = Instant(self._coordinator.now + self._config.withdraw_seconds_max)
        self._coordinator.clocks.arm(trip)

    def _abort(self, trip: Trip, indices: list[int], reason: FinishReason) -> None:
        if trip.home is None:
            return
        whole = list(trip.open) == indices  # of a hand-off: those that ended are not open any more, and the others go on
        for index in [None] if whole else indices:
            self._coordinator.effects.append(Tell(trip.home.session, AbortRequest(trip.id, index, reason)))
