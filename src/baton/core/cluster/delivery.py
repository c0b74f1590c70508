"""Delivers tokens and ends of instances to clients: each position once, in order, and only of the present attempt.

Most emits are correct and are passed on as the same object: a token costs three lookups, two compares and an append. The others
are sifted row by row.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.core.cluster.cluster_instance import ClusterInstance
from baton.core.cluster.coordinator import Coordinator
from baton.core.cluster.events import Deliver
from baton.core.cluster.handoff_table import RequestFact, RequestState
from baton.core.cluster.placement import Placement
from baton.core.cluster.routed_request import RoutedRequest
from baton.core.delivery.take import LogprobRow, begun_by, sift
from baton.protocol.ids import RequestId
from baton.protocol.output import RETRYABLE, Emit, Ended, TokenRow, tokens_of
from baton.protocol.request import FinishReason


class Delivery:
    __slots__ = ("_coordinator", "_placement")

    def __init__(self, coordinator: Coordinator, placement: Placement) -> None:
        self._coordinator = coordinator
        self._placement = placement

    def take(self, instance: ClusterInstance, emit: Emit) -> bool:
        """Deliver the tokens of an instance's emit. True: a sequence has ended or its attempt broke, so other requests may have
        a chance."""
        if emit.ended or emit.logprobs:
            return self._sift(instance, emit)
        routed_requests, assigned, rows = self._coordinator.routed_requests, instance.assigned, iter(emit.tokens)
        try:
            for row in rows:
                request, attempt, index, position, tokens = row
                routed = routed_requests[request]
                delivered = routed.open[index]
                if position != len(delivered) or attempt != routed.attempt or request not in assigned:
                    break
                if type(tokens) is int:
                    delivered.append(tokens)
                else:
                    delivered.extend(tokens_of(tokens))
            else:
                self._coordinator.effects.append(Deliver(emit))
                return False
        except KeyError:  # its request or sequence has ended
            pass
        return self._sift_rest(instance, emit, row, rows)

    def _sift_rest(self, instance: ClusterInstance, emit: Emit, row: TokenRow, rows: Iterator[TokenRow]) -> bool:
        """Sift the rows from the first unexpected one on."""
        rest = [row, *rows]
        fresh = emit.tokens[: len(emit.tokens) - len(rest)]
        broken: dict[RequestId, RoutedRequest] = {}
        fresh += [taken for row in rest if (taken := self._taken(instance, row, broken)) is not None]
        if fresh:
            self._coordinator.effects.append(Deliver(Emit(fresh, [], begun=begun_by(fresh, emit.begun))))
        self._break(broken, instance)
        return bool(broken)

    def _sift(self, instance: ClusterInstance, emit: Emit) -> bool:
        broken: dict[RequestId, RoutedRequest] = {}
        touched: dict[RequestId, RoutedRequest] = {}
        sifted = sift(
            emit,
            self._prompts_owed(instance, emit.logprobs),
            lambda row: self._taken(instance, row, broken),
            lambda ended: self._end(instance, ended, broken, touched),
        )
        if sifted.tokens or sifted.ended or sifted.logprobs:
            self._coordinator.effects.append(Deliver(emit if sifted == emit else sifted))
        for routed in touched.values():
            self._after_end(routed, broken)
        self._break(broken, instance)
        return bool(touched or broken)

    def _taken(self, instance: ClusterInstance, row: TokenRow, broken: dict[RequestId, RoutedRequest]) -> TokenRow | None:
        """The row from the first position that its client does not have. None: the client has all of its tokens."""
        routed = self._current_attempt(instance, row[0], row[1])
        if routed is not None and routed.misses(row):
            broken[routed.id] = routed
            return None
        taken = None if routed is None else routed.take(row)
        self._coordinator.stats.stale_rows += taken is None
        return taken

    def _current_attempt(self, instance: ClusterInstance, request: RequestId, attempt: int) -> RoutedRequest | None:
        """The routed request, if this instance has its present attempt."""
        routed = self._coordinator.routed_requests.get(request)
        return (
            routed
            if routed is not None and attempt == routed.attempt and instance in (routed.decoder, routed.prefill)
            else None
        )

    def _prompts_owed(self, instance: ClusterInstance, rows: list[LogprobRow]) -> dict[RequestId, bool]:
        """Requests whose prompt log-probabilities are not delivered, before the tokens of this emit are."""
        owed = {}
        for request, _, row in rows:
            if row.prompt and request not in owed:
                routed = self._coordinator.routed_requests.get(request)
                owed[request] = routed is not None and routed.prompt_owed and instance in (routed.decoder, routed.prefill)
        return owed

    # Ends

    def _end(
        self,
        instance: ClusterInstance,
        ended: Ended,
        broken: dict[RequestId, RoutedRequest],
        touched: dict[RequestId, RoutedRequest],
    ) -> Ended | None:
        """The end to deliver. None: the end is stale, or another instance continues the sequence."""
        routed = self._current_attempt(instance, ended.request, ended.attempt)
        if routed is None or ended.index not in routed.open:
            self._coordinator.stats.stale_rows += 1
            return None
        if routed.id in broken or not self._is_an_end(instance, routed, ended):
            broken[routed.id] = routed
            return None
        touched[routed.id] = routed
        if instance is routed.decoder and len(routed.open[ended.index]) >= instance.hello.ready.block_size:
            self._placement.remember(instance, routed, (*routed.request.prompt, *routed.open[ended.index]))
        self._coordinator.sequence_over(routed, ended.index)
        return routed.end_as_reported(ended)

    @staticmethod
    def _is_an_end(instance: ClusterInstance, routed: RoutedRequest, ended: Ended) -> bool:
        """Whether this is the sequence's end. False: another instance can continue the sequence."""
        if ended.error in RETRYABLE:
            return False
        asked, delivered = ended.index in routed.withdrawn, len(routed.open[ended.index])
        if ended.output_tokens > delivered:  # some tokens never arrived
            return False
        match ended.reason:
            case FinishReason.ABORT:
                return asked
            case FinishReason.TIMEOUT:
                return asked or routed.request.timeout_seconds is not None
            case FinishReason.LENGTH:
                return instance is routed.decoder or delivered >= routed.request.sampling.max_tokens
        return True

    def _after_end(self, routed: RoutedRequest, broken: dict[RequestId, RoutedRequest]) -> None:
        """Advance the request after ends of its sequences were delivered."""
        if routed.id in broken:
            return
        if not routed.open:
            self._coordinator.advance(routed, RequestFact.ENDED)
        elif routed.state is not RequestState.SERVING:  # the hand-off's leader ended; its siblings begin anew
            self._coordinator.advance(routed, RequestFact.LEADER_OVER)

    def _break(self, broken: dict[RequestId, RoutedRequest], instance: ClusterInstance) -> None:
        """Start another attempt. A stopped instance ends its remaining requests when its time is up
        (core/engine/service_mode.py)."""
        for routed in broken.values():
            self._coordinator.break_attempt(routed, instance, leaves=instance.mode != "serving")
