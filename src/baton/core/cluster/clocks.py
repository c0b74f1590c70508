"""Deadlines of a routed request: every state has one, and the request has one alarm, for the earliest.

    QUEUED      queue_seconds_max; no_instance_seconds while no instance works
    RESERVING   reserve_seconds_max
    PREFILLING  prefill_seconds_max since the last computed block; the lease at decode is renewed in time
    HANDING     handing_seconds_max
    SERVING     silence_seconds_max since the last token: checked only then, so that a token costs nothing

Besides: the request's own timeout, and the wait for the end of a withdrawn sequence.
"""

from __future__ import annotations

from typing import Final

from baton.config import RouterConfig
from baton.core.cluster.alarms import Alarms
from baton.core.cluster.handoff_table import RequestFact, RequestState
from baton.core.cluster.routed_request import RoutedRequest
from baton.protocol.ids import Instant

BEGUN: Final = (RequestState.PREFILLING, RequestState.HANDING, RequestState.SERVING)
"""States in which an instance works on the request. From there, a request returns to the queue with a new waiting time."""


class Clocks:
    __slots__ = ("_config", "alarms", "no_instance_since")

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.alarms = Alarms()
        self.no_instance_since: Instant | None = None
        "Time since which no instance works. None: some instances work."

    def set(self, routed: RoutedRequest, before: RequestState, fact: RequestFact, now: Instant) -> None:
        """Set the deadlines when a state begins, or a new block was computed in it."""
        config, begins = self._config, routed.state is not before
        match routed.state:
            case RequestState.RESERVING:
                routed.deadline = Instant(now + config.reserve_seconds_max)
            case RequestState.PREFILLING:
                if begins:
                    self.renewed(routed, now)
                if begins or fact is RequestFact.OFFERED:
                    routed.deadline = Instant(now + config.prefill_seconds_max)
            case RequestState.HANDING:
                if begins:
                    routed.deadline = Instant(now + config.handing_seconds_max)
            case RequestState.SERVING:
                self.progressed(routed, now)
        if routed.state is not RequestState.PREFILLING:
            routed.renew_at = None
        if before in BEGUN:
            routed.queued_at, routed.no_room_since = now, None
        if not routed.withdrawn:
            routed.withdraw_by = None

    def renewed(self, routed: RoutedRequest, now: Instant) -> None:
        """Record that decode keeps its reservation for the whole lease from now on."""
        routed.renew_at = Instant(now + self._config.lease_seconds / 2)

    def progressed(self, routed: RoutedRequest, now: Instant) -> None:
        routed.mark = routed.progress
        routed.deadline = Instant(now + self._config.silence_seconds_max)

    def arm(self, routed: RoutedRequest) -> None:
        """Set the alarm to the earliest time of the request. Also sets `routed.deadline` while it is QUEUED."""
        if routed.state is RequestState.DONE:
            return
        if routed.state is RequestState.QUEUED:
            routed.deadline = self._queue_deadline(routed)
        at = routed.deadline
        for other in (routed.renew_at, routed.timeout_at, routed.withdraw_by):
            if other is not None and other < at:
                at = other
        self.alarms.set(routed, at)

    def _queue_deadline(self, routed: RoutedRequest) -> Instant:
        deadline = routed.queued_at + self._config.queue_seconds_max
        if self.no_instance_since is not None:
            deadline = min(deadline, max(self.no_instance_since, routed.queued_at) + self._config.no_instance_seconds)
        return Instant(deadline)
