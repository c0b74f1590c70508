"""How long a trip may stay as it is. Every state has a deadline; a trip has one alarm, for the first thing that is due.

    QUEUED      queue_seconds_max; no_instance_seconds while no instance works
    RESERVING   reserve_seconds_max
    PREFILLING  prefill_seconds_max since something new was computed; the lease at decode is renewed in time
    HANDING     handing_seconds_max
    SERVING     silence_seconds_max since the last token: looked at then, so that a token costs nothing

Beside it: the request's own time-out, and how long the end of a withdrawn sequence is waited for.
"""

from __future__ import annotations

from typing import Final

from baton.config import RouterConfig
from baton.core.cluster.alarms import Alarms
from baton.core.cluster.handoff_table import TripFact, TripState
from baton.core.cluster.trip import Trip
from baton.protocol.ids import Instant

BEGUN: Final = (TripState.PREFILLING, TripState.HANDING, TripState.SERVING)
"""An instance works on it. Who comes back in line from there begins to wait anew."""


class Clocks:
    __slots__ = ("_config", "alarms", "nobody_since")

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.alarms = Alarms()
        self.nobody_since: Instant | None = None
        "Since when no instance works. None: some do."

    def set(self, trip: Trip, before: TripState, fact: TripFact, now: Instant) -> None:
        """A state begins, or something new was computed in it."""
        config, begins = self._config, trip.state is not before
        match trip.state:
            case TripState.RESERVING:
                trip.deadline = Instant(now + config.reserve_seconds_max)
            case TripState.PREFILLING:
                if begins:
                    self.renewed(trip, now)
                if begins or fact is TripFact.OFFERED:
                    trip.deadline = Instant(now + config.prefill_seconds_max)
            case TripState.HANDING:
                if begins:
                    trip.deadline = Instant(now + config.handing_seconds_max)
            case TripState.SERVING:
                self.heard(trip, now)
        if trip.state is not TripState.PREFILLING:
            trip.renew_at = None
        if before in BEGUN:
            trip.queued_at = now
        if not trip.withdrawn:
            trip.withdraw_by = None

    def renewed(self, trip: Trip, now: Instant) -> None:
        """Decode keeps its room for the whole lease from now on."""
        trip.renew_at = Instant(now + self._config.lease_seconds / 2)

    def heard(self, trip: Trip, now: Instant) -> None:
        trip.mark = trip.progress
        trip.deadline = Instant(now + self._config.silence_seconds_max)

    def arm(self, trip: Trip) -> None:
        if trip.state is TripState.DONE:
            return
        if trip.state is TripState.QUEUED:
            trip.deadline = self._queue_deadline(trip)
        at = trip.deadline
        for other in (trip.renew_at, trip.timeout_at, trip.withdraw_by):
            if other is not None and other < at:
                at = other
        self.alarms.set(trip, at)

    def _queue_deadline(self, trip: Trip) -> Instant:
        deadline = trip.queued_at + self._config.queue_seconds_max
        if self.nobody_since is not None:
            deadline = min(deadline, max(self.nobody_since, trip.queued_at) + self._config.no_instance_seconds)
        return Instant(deadline)
