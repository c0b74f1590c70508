"""Performs the table of a routed request (handoff_table.py): assigns its parts to instances, and sends their messages.

`advance(routed request, fact)` is the only way a routed request's state changes. The state that goes with it is kept here too:
the queue, the assigned requests of each instance and its credits; clocks.py has the deadlines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from baton.config import RouterConfig
from baton.core.cluster.choice import Choice
from baton.core.cluster.clocks import Clocks
from baton.core.cluster.cluster_instance import ClusterInstance
from baton.core.cluster.events import ClusterEffect, Deliver, FailRequest, RejectRequest, SendToInstance, ToInstance
from baton.core.cluster.handoff_table import HANDED_OFF, LATE, NEXT, OUTCOMES, RequestAction, RequestFact, RequestState
from baton.core.cluster.membership import Membership
from baton.core.cluster.placement import Placement
from baton.core.cluster.request_queue import RequestQueue
from baton.core.cluster.routed_request import RoutedRequest
from baton.core.cluster.stats import RouterStats
from baton.errors import InvariantBroken
from baton.protocol.handoff import Forget, Offer, PeerOffer, Prefill, Release, Released, Reserve
from baton.protocol.ids import Instant, RequestId
from baton.protocol.output import Emit, Ended, EndError
from baton.protocol.request import FinishReason, Refused

TO_COMPUTE: Final = (RequestState.RESERVING, RequestState.PREFILLING)
"""States in which a prefill instance still has to compute the prompt."""
WAITED_LEARNING: Final = 0.125
NO_INSTANCE: Final = "no instance goes on with the request"
"""Beginning of the error of a partly answered request that no instance can hold."""
RETRY_SECONDS_MIN: Final = 1.0
RETRY_SECONDS_MAX: Final = 60.0
WAIT_SHARE: Final = 0.5
"""Share of the time for a reservation that the request may wait for room; the rest is for the messages."""
KEEP_MARGIN_SECONDS: Final = 2.0
"""Seconds for which a prompt is kept beyond the time that decode may take to copy it."""


class Coordinator:
    __slots__ = (
        "_actions",
        "_config",
        "_placement",
        "clocks",
        "dirty",
        "effects",
        "membership",
        "now",
        "queue",
        "routed_requests",
        "stats",
        "waited_seconds",
    )

    def __init__(
        self,
        config: RouterConfig,
        membership: Membership,
        placement: Placement,
        routed_requests: dict[RequestId, RoutedRequest],
        stats: RouterStats,
    ) -> None:
        """`routed_requests`: all open requests. Only the coordinator adds and removes them; others read."""
        self._config = config
        self._placement = placement
        self.membership = membership
        self.stats = stats
        self.routed_requests = routed_requests
        self.queue = RequestQueue(config)
        self.clocks = Clocks(config)
        self.effects: list[ClusterEffect] = []
        self.now = Instant(0.0)
        self.dirty = False
        "Whether a change since the last placement pass gives requests in the queue a better chance."
        self.waited_seconds = 0.0
        "Recent waiting time of new requests in the queue, as a running mean."
        self._actions: dict[RequestAction, Callable[[RoutedRequest, Any], None]] = {
            RequestAction.SEND: self._send,
            RequestAction.EXPECT: self._reserve,
            RequestAction.PREFILL: self._prefill,
            RequestAction.PASS_OFFER: self._pass_offer,
            RequestAction.PASS_ASK: self._pass_ask,
            RequestAction.PASS_RELEASE: self._pass_release,
            RequestAction.DENY_RELEASE: self._deny_release,
            RequestAction.FORGET_PREFILL: self._forget_prefill,
            RequestAction.FORGET_DECODER: self._forget_decoder,
            RequestAction.COUNT_LOSS: self._count_loss,
            RequestAction.REQUEUE: self._requeue,
        }

    # States of a routed request

    def begin(self, routed: RoutedRequest) -> None:
        self.routed_requests[routed.id] = routed
        self.queue.join(routed)
        self.dirty = True
        self.clocks.arm(routed)

    def place(self, routed: RoutedRequest, choice: Choice) -> None:
        """Assign the request to the chosen instances."""
        routed.identity = choice.decoder.hello.ready.identity
        routed.mark, routed.base = routed.progress, len(routed.open[routed.leader])
        routed.waited_for_lost = False
        if routed.first:
            self.waited_seconds += WAITED_LEARNING * (self.now - routed.begun - self.waited_seconds)
        decoder, prefill = choice.decoder, choice.prefill
        routed.decoder = decoder
        decoder.assigned[routed.id] = None
        decoder.sequences += len(routed.open)
        decoder.slots_since -= len(routed.open)
        decoder.blocks_since -= choice.blocks
        self._hold(routed, decoder)
        if choice.waits:
            decoder.over_capacity[routed.id] = routed.order
        self.membership.roster.touch(decoder)
        if prefill is None:
            decoder.tokens_since += choice.uncached
            self.stats.whole += 1
            self.advance(routed, RequestFact.PLACED_WHOLE)
        else:
            routed.prefill, routed.source = prefill, prefill.session
            routed.copied = routed.denied = False
            prefill.assigned[routed.id] = None
            routed.prompt_tokens = choice.uncached
            prefill.prompts += 1
            prefill.prompt_tokens += choice.uncached
            prefill.tokens_since += choice.uncached
            self.membership.roster.touch(prefill)
            self.advance(routed, RequestFact.PLACED_PAIR)

    def _hold(self, routed: RoutedRequest, decoder: ClusterInstance) -> None:
        """Count the blocks of the request, as those that a more urgent one may get."""
        size = decoder.hello.ready.block_size
        routed.placed_blocks = -(-(routed.tokens + 1) // size) + len(routed.open) - 1
        for placed in (decoder.placed, self.membership.roster.placed):
            placed.add(routed.order[0], routed.placed_blocks)

    def advance(self, routed: RoutedRequest, fact: RequestFact, message: Offer | Released | None = None) -> None:
        """Change the state by the table, and perform its actions. Raises InvariantBroken for a pair that is not in it."""
        before = routed.state
        if (before, fact) in LATE:
            self.stats.late_facts += 1
            return
        following = NEXT.get((before, fact))
        if following is None:
            raise InvariantBroken(f"{routed!r}: {fact.value} is not in the table", invariant=36)
        routed.state, actions = following
        if before in TO_COMPUTE and routed.state not in TO_COMPUTE and routed.prefill is not None:
            self._prompt_ended(routed, routed.prefill)
        if before is RequestState.QUEUED:
            self.queue.leave(routed)
        if fact is RequestFact.BROKEN:
            self.stats.broken += 1
        if before in HANDED_OFF and routed.state not in HANDED_OFF:
            in_vain = fact is RequestFact.ADOPTED and not routed.copied
            self.stats.handoff_ends["not_copied" if in_vain else OUTCOMES[fact]] += 1
        self._measure(routed, before)
        self.clocks.set(routed, before, fact, self.now)
        for action in actions:
            self._actions[action](routed, message)
        if routed.state is RequestState.DONE:
            self._detach_prefill(routed)
            self._detach_decoder(routed)
            self.clocks.alarms.clear(routed)
            self.routed_requests.pop(routed.id, None)
        else:
            self.clocks.arm(routed)

    def _prompt_ended(self, routed: RoutedRequest, prefill: ClusterInstance) -> None:
        """Record that the prompt is computed, or no longer wanted."""
        prefill.prompts -= 1
        prefill.prompt_tokens -= routed.prompt_tokens
        self._has_room(prefill)

    def _has_room(self, instance: ClusterInstance) -> None:
        """Record that the instance has more room than before: requests in the queue may have a chance."""
        self.membership.roster.touch(instance)
        self.dirty = True

    def begun(self, instance: ClusterInstance) -> None:
        """The instance sent a message. Requests that waited there for room and have a token or a reservation now do not wait
        any more."""
        for request in list(instance.over_capacity):
            routed = self.routed_requests.get(request)
            if (
                routed is None
                or routed.decoder is not instance
                or routed.progress != routed.mark
                or routed.state is RequestState.PREFILLING
            ):
                del instance.over_capacity[request]
                self._has_room(instance)

    def _measure(self, routed: RoutedRequest, before: RequestState) -> None:
        """Measure the cost of a hand-off besides the computing: reserving blocks, and from the last computed block to the
        adoption."""
        match before, routed.state:
            case (RequestState.QUEUED, RequestState.RESERVING) | (RequestState.PREFILLING, RequestState.HANDING):
                routed.asked_at = self.now
            case RequestState.RESERVING, RequestState.PREFILLING:
                routed.handoff_seconds = self.now - routed.asked_at
            case RequestState.HANDING, RequestState.SERVING if routed.copied:
                self.stats.handoffs += 1
                self._placement.measured(routed.handoff_seconds + self.now - routed.asked_at)

    # Actions

    def _send(self, routed: RoutedRequest, _: object) -> None:
        self._send_to(routed.decoder, routed.replay(self.now))
        self._remember(routed.decoder, routed)

    def _reserve(self, routed: RoutedRequest, _: object) -> None:
        wait = self._wait_seconds(routed)
        self._send_to(routed.decoder, Reserve(routed.for_decode(self.now), self._config.lease_seconds, wait))

    def _wait_seconds(self, routed: RoutedRequest) -> float:
        """Seconds that the reservation may wait for room at the decode instance. If another instance could have room, 0: the
        answer comes at once."""
        others = self.membership.roster.able(("decode", "mixed"), routed.tokens_max, settled=True) > 1
        return 0.0 if others and not routed.short else WAIT_SHARE * self._config.reserve_seconds_max

    def renew(self, routed: RoutedRequest) -> None:
        """Renew the reservation at the decode instance, because prefill is slow."""
        self.clocks.renewed(routed, self.now)
        self._reserve(routed, None)
        self.clocks.arm(routed)

    def _prefill(self, routed: RoutedRequest, _: object) -> None:
        keep = self._config.handing_seconds_max + KEEP_MARGIN_SECONDS
        self._send_to(routed.prefill, Prefill(routed.for_prefill(self.now), keep))
        self._remember(routed.prefill, routed)

    def _pass_offer(self, routed: RoutedRequest, offer: Offer) -> None:
        outputs = tuple(routed.open[routed.leader]) if offer.last else ()
        routed.denied |= offer.last and not offer.tokens  # the source keeps no blocks
        if not offer.last:  # this message renews the lease too
            self.clocks.renewed(routed, self.now)
        if routed.prefill is not None:
            self._send_to(routed.decoder, PeerOffer(offer, routed.prefill.hello.peers, outputs))

    def _pass_ask(self, routed: RoutedRequest, _: object) -> None:
        if routed.prefill is None:
            self._deny_release(routed, None)
        else:
            self._send_to(routed.prefill, Release(routed.id, routed.attempt))

    def _pass_release(self, routed: RoutedRequest, released: Released) -> None:
        """Send the release. The prefill instance has no part of the request afterwards, whatever the result."""
        routed.denied |= not released.kept
        self._send_to(routed.decoder, released)
        self._detach_prefill(routed)

    def _deny_release(self, routed: RoutedRequest, _: object) -> None:
        routed.denied = True
        self._send_to(routed.decoder, Released(routed.id, routed.attempt, kept=False))
        self._detach_prefill(routed)

    def _forget_prefill(self, routed: RoutedRequest, _: object) -> None:
        if routed.prefill is not None:
            self._send_to(routed.prefill, Forget(routed.id, routed.attempt))
            self._detach_prefill(routed)
        if routed.state is RequestState.SERVING:
            self._remember(routed.decoder, routed)

    def _forget_decoder(self, routed: RoutedRequest, _: object) -> None:
        if routed.decoder is not None:
            self._send_to(routed.decoder, Forget(routed.id, routed.attempt))
            self._detach_decoder(routed)

    def _count_loss(self, routed: RoutedRequest, _: object) -> None:
        routed.losses += 1

    def _requeue(self, routed: RoutedRequest, _: object) -> None:
        """Return to the queue with the next attempt. Sequences that are withdrawn or complete end here, because no instance
        will end them."""
        routed.withdraw_by = None
        self._detach_prefill(routed)
        self._detach_decoder(routed)
        routed.attempt += 1
        routed.first = False
        self.queue.join(routed)
        self.dirty = True
        self.end(routed, routed.over())
        if not routed.open:
            self.advance(routed, RequestFact.CLOSED)
        elif routed.losses > self._config.migrations_max:
            self.break_off(routed, "worker_gone", f"{routed.losses} instances were lost or failed while they had this request")
        else:
            self.stats.retries += 1

    # Ends

    def end(self, routed: RoutedRequest, over: list[tuple[int, FinishReason]]) -> None:
        """End sequences on the router's own account. The state of the request does not change."""
        ended: list[Ended] = []
        for index, reason in over:
            self.sequence_over(routed, index)
            ended.append(routed.end(index, reason))
        if ended:
            self.effects.append(Deliver(Emit([], ended)))

    def break_off(self, routed: RoutedRequest, error: EndError, detail: str) -> None:
        self.stats.broken_off[error] += 1
        self.effects.append(FailRequest(routed.id, error, detail))
        self.advance(routed, RequestFact.CLOSED)

    def reject(self, routed: RoutedRequest, refused: Refused) -> None:
        """Reject the request. A client that has received tokens gets an error instead."""
        if not routed.untouched:
            self.break_off(routed, "worker_gone", f"{NO_INSTANCE}: {refused}")
            return
        self.stats.turned_away[refused.reason] += 1
        self.effects.append(RejectRequest(routed.id, refused, self.retry_seconds(refused)))
        self.advance(routed, RequestFact.CLOSED)

    def retry_seconds(self, refused: Refused) -> float:
        """Seconds after which a retry may succeed: the recent waiting time of placed requests."""
        if refused.reason == "worker_gone":
            return self._config.no_instance_seconds
        return min(max(self.waited_seconds, RETRY_SECONDS_MIN), RETRY_SECONDS_MAX)

    def sequence_over(self, routed: RoutedRequest, index: int) -> None:
        """Update the counters for a sequence that is about to leave `routed.open`."""
        decoder = routed.decoder
        if routed.state is RequestState.QUEUED:
            self.queue.resize(routed, 1)
        elif decoder is not None:
            decoder.sequences -= 1
            decoder.slots_since += 1
            tokens = len(routed.open[index]) + (len(routed.request.prompt) if len(routed.open) == 1 else 0)
            decoder.blocks_since += tokens // decoder.hello.ready.block_size
            self._has_room(decoder)

    def survives_break(self, routed: RoutedRequest) -> bool:
        """Whether another attempt follows if the present one breaks, or the request ends with an error."""
        counted = RequestAction.COUNT_LOSS in NEXT[routed.state, RequestFact.BROKEN][1]
        return routed.losses + counted <= self._config.migrations_max

    def break_attempt(self, routed: RoutedRequest, instance: ClusterInstance | None, *, leaves: bool = False) -> None:
        """End the attempt: the instance fails the request, or leaves. Another attempt follows, at another instance."""
        if instance is not None:
            routed.avoid(instance.name, Instant(self.now + self._config.again_seconds), self.now)
        self.stats.left += leaves
        self.advance(routed, RequestFact.LEFT if leaves else RequestFact.BROKEN)

    def lose(self, instance: ClusterInstance) -> None:
        """Remove a lost instance. Its requests continue at other instances."""
        for routed in self.requests_at(instance):
            routed.avoid(instance.name, Instant(self.now + self._config.again_seconds), self.now)
            self.advance(routed, RequestFact.DECODER_LOST if routed.decoder is instance else RequestFact.PREFILL_LOST)
        if instance.assigned:
            raise InvariantBroken(f"{instance!r} is gone and has something", invariant=46)

    # Assigned requests

    def requests_at(self, instance: ClusterInstance) -> list[RoutedRequest]:
        """The requests of which the instance has a part."""
        return [self.routed_requests[request] for request in instance.assigned]

    def request_at(self, instance: ClusterInstance, request: RequestId) -> RoutedRequest | None:
        return self.routed_requests[request] if request in instance.assigned else None

    def _detach_decoder(self, routed: RoutedRequest) -> None:
        decoder, routed.decoder = routed.decoder, None
        if decoder is not None:
            del decoder.assigned[routed.id]
            for placed in (decoder.placed, self.membership.roster.placed):
                placed.remove(routed.order[0], routed.placed_blocks)
            decoder.over_capacity.pop(routed.id, None)
            self._has_room(decoder)
            decoder.sequences -= len(routed.open)
            decoder.slots_since += len(routed.open)
            if routed.open:
                decoder.blocks_since += (routed.delivered_tokens + len(routed.request.prompt)) // decoder.hello.ready.block_size

    def _detach_prefill(self, routed: RoutedRequest) -> None:
        prefill, routed.prefill = routed.prefill, None
        if prefill is not None:
            del prefill.assigned[routed.id]

    def _remember(self, instance: ClusterInstance | None, routed: RoutedRequest) -> None:
        if instance is not None:
            self._placement.remember(instance, routed, routed.request.prompt)

    def _send_to(self, instance: ClusterInstance | None, message: ToInstance) -> None:
        if instance is None:
            raise InvariantBroken(f"{type(message).__name__} without a recipient", invariant=36)
        self.effects.append(SendToInstance(instance.session, message))
