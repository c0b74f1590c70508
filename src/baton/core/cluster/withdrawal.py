"""Withdrawal of a request, or of one of its sequences: the client disconnected, a stop string was found, or the timeout passed.

    QUEUED, RESERVING, HANDING    the router ends it at once: no instance has more to report about it
    PREFILLING                    likewise; but if the first token is out, its usage follows at once and is awaited
    SERVING                       the decode instance ends it, with the usage

Every wait is limited by `withdraw_seconds_max`, and ends with the loss of the instance.
"""

from __future__ import annotations

from baton.config import RouterConfig
from baton.core.cluster.coordinator import Coordinator
from baton.core.cluster.events import SendToInstance
from baton.core.cluster.handoff_table import RequestFact, RequestState
from baton.core.cluster.routed_request import RoutedRequest
from baton.protocol.control import AbortRequest
from baton.protocol.ids import Instant
from baton.protocol.request import FinishReason


class Withdrawal:
    __slots__ = ("_config", "_coordinator")

    def __init__(self, config: RouterConfig, coordinator: Coordinator) -> None:
        self._config = config
        self._coordinator = coordinator

    def withdraw(self, routed: RoutedRequest, indices: list[int], reason: FinishReason) -> None:
        indices = [index for index in indices if index not in routed.withdrawn]
        if not indices:
            return
        if routed.state is RequestState.SERVING:
            self._abort(routed, indices, reason)
            self._wait(routed, indices, reason)
        elif routed.state is RequestState.PREFILLING and routed.leader in indices and self._usage_follows(routed):
            self._wait(routed, indices, reason)
        else:
            self.end(routed, [(index, reason) for index in indices])

    def end(self, routed: RoutedRequest, over: list[tuple[int, FinishReason]]) -> None:
        """End these sequences on the router's own account. The hand-off ends with its leader."""
        coordinator, leader = self._coordinator, routed.leader
        coordinator.end(routed, over)
        if not routed.open:
            coordinator.advance(routed, RequestFact.CLOSED)
        elif routed.state is RequestState.QUEUED or routed.state is RequestState.SERVING:
            coordinator.clocks.arm(routed)
        elif leader not in routed.open:
            coordinator.advance(routed, RequestFact.LEADER_OVER)
        else:
            for index, reason in over:
                self._abort(routed, [index], reason)

    def lapse(self, routed: RoutedRequest) -> None:
        """End the withdrawn sequences: the decode instance has not ended them in time."""
        routed.withdraw_by = None
        self.end(routed, list(routed.withdrawn.items()))

    @staticmethod
    def _usage_follows(routed: RoutedRequest) -> bool:
        return routed.usage is None and len(routed.open[routed.leader]) > routed.base

    def _wait(self, routed: RoutedRequest, indices: list[int], reason: FinishReason) -> None:
        for index in indices:
            routed.withdrawn[index] = reason
        routed.withdraw_by = Instant(self._coordinator.now + self._config.withdraw_seconds_max)
        self._coordinator.clocks.arm(routed)

    def _abort(self, routed: RoutedRequest, indices: list[int], reason: FinishReason) -> None:
        if routed.decoder is None:
            return
        whole = list(routed.open) == indices  # in a hand-off the ended sequences are not open any more, and the others continue
        for index in [None] if whole else indices:
            self._coordinator.effects.append(SendToInstance(routed.decoder.session, AbortRequest(routed.id, index, reason)))
