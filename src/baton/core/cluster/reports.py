"""Turns messages of instances into facts of the request table. A message of an ended attempt, or from an instance that has no
part in the request, is counted and ignored.

A handler returns whether requests in the queue may have a better chance now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from baton.config import RouterConfig
from baton.core.cluster.cluster_instance import ClusterInstance
from baton.core.cluster.coordinator import Coordinator
from baton.core.cluster.events import WarnOfInstance
from baton.core.cluster.handoff_table import RequestFact, RequestState
from baton.core.cluster.placement import Placement
from baton.core.cluster.routed_request import RoutedRequest
from baton.core.cluster.withdrawal import Withdrawal
from baton.protocol.control import InstanceStats, RefusedRequest
from baton.protocol.handoff import Adopted, Offer, Release, Released, Reserved
from baton.protocol.ids import Instant, RequestId
from baton.protocol.instance import CachedKeys, Heartbeat
from baton.protocol.versions import CACHED_KEYS

NEVER: Final = ("never_fits", "never_planned", "never_queued")
NO_ROOM: Final = ("no_room", "queue_full", "queue_tokens_full")
"""Refusals after which the instance is tried again at its next heartbeat."""
NOT_NOW: Final = ("draining", "paused", "worker_gone")
"""Refusals that concern the instance, not the request."""
DIGEST_RATE: Final = 2
"""Allowed messages of keys per heartbeat that is due. An instance sends one at most, with its heartbeat."""
DIGESTS_SPARE: Final = 8
"""Number of heartbeats whose messages may come early, besides those of `lapse_seconds`: a stalled connection or router
delivers what has gathered meanwhile."""


class Reports:
    __slots__ = ("_config", "_coordinator", "_lose", "_placement", "_stats", "_withdrawal", "handlers")

    def __init__(
        self,
        config: RouterConfig,
        coordinator: Coordinator,
        placement: Placement,
        withdrawal: Withdrawal,
        lose: Callable[[ClusterInstance, str, str], None],
    ) -> None:
        """`lose`: removes an instance, and ends its session with a reason (Router)."""
        self._config = config
        self._lose = lose
        self._placement = placement
        self._withdrawal = withdrawal
        self._coordinator = coordinator
        self._stats = coordinator.stats
        self.handlers: dict[type[Any], Callable[[ClusterInstance, Any], bool]] = {
            Heartbeat: self._on_beat,
            InstanceStats: self._on_stats,
            CachedKeys: self._on_cached_keys,
            RefusedRequest: self._on_refused,
            Reserved: self._on_reserved,
            Offer: self._on_offer,
            Release: self._on_release,
            Released: self._on_released,
            Adopted: self._on_adopted,
        }

    def _on_beat(self, instance: ClusterInstance, beat: Heartbeat) -> bool:
        now = self._coordinator.now
        has_room = self._coordinator.membership.on_beat(instance, beat, now)
        for request in beat.preempted:
            if (routed := self._coordinator.request_at(instance, request)) is not None:
                routed.preempted[instance.name] = Instant(now + self._config.preempted_seconds)
        return has_room

    def _on_cached_keys(self, instance: ClusterInstance, message: CachedKeys) -> bool:
        if why := self._is_no_digest(instance):
            self._lose(instance, "digests", why)
            return True
        cut = self._placement.publish(instance, message)
        self._stats.digest_bytes += len(message.added) + len(message.removed)
        if cut and not instance.over_share:
            instance.over_share = True
            share = self._placement.index.share
            text = f"it publishes more keys of cached blocks than the router keeps of one instance ({share}): the oldest go"
            self._coordinator.effects.append(WarnOfInstance(instance.session, text))
        return False

    def _is_no_digest(self, instance: ClusterInstance) -> str:
        """The reason why the instance may not send keys now. Empty: it may. A message costs milliseconds, and requests wait
        meanwhile."""
        if CACHED_KEYS not in instance.hello.capabilities:
            return "it sends keys of cached blocks, and its hello does not list the capability cached_keys"
        config, now = self._config, self._coordinator.now
        due = max(instance.digests_due, now) + config.beat_seconds / DIGEST_RATE
        if due - now > config.lapse_seconds + DIGESTS_SPARE * config.beat_seconds:
            return f"it sends keys of cached blocks more than {DIGEST_RATE} times per heartbeat ({config.beat_seconds:g} s)"
        instance.digests_due = Instant(due)
        return ""

    def _on_stats(self, instance: ClusterInstance, stats: InstanceStats) -> bool:
        changed = instance.mode != stats.mode
        if changed:
            self._coordinator.membership.set_mode(instance, stats.mode)
        return changed

    def _on_refused(self, instance: ClusterInstance, message: RefusedRequest) -> bool:
        routed = self._current_attempt(instance, message.request, message.attempt)
        if routed is None:
            return False
        refused, now = message.refused, self._coordinator.now
        self._stats.refused[refused.reason] += 1
        until = Instant(now + self._config.again_seconds)
        if refused.reason in NEVER:
            routed.unfit[instance.name] = None
            routed.refused = refused
        elif refused.reason in NO_ROOM:
            routed.short[instance.name] = instance.beat
            instance.short_for = True
        else:
            routed.avoid(instance.name, until, now)
        if refused.reason in NOT_NOW:
            instance.held_until = until
            self._coordinator.membership.roster.touch(instance)
        self._coordinator.advance(routed, RequestFact.REFUSED)
        return True

    def _on_reserved(self, instance: ClusterInstance, message: Reserved) -> bool:
        routed = self._coordinator.request_at(instance, message.request)
        if routed is not None and routed.state is RequestState.RESERVING and routed.attempt == message.attempt:
            routed.asked_at = Instant(min(routed.asked_at + message.waited_seconds, self._coordinator.now))
        return self._reported_by_decoder(instance, message.request, message.attempt, RequestFact.RESERVED)

    def _on_release(self, instance: ClusterInstance, message: Release) -> bool:
        return self._reported_by_decoder(instance, message.request, message.attempt, RequestFact.ASKED)

    def _on_adopted(self, instance: ClusterInstance, message: Adopted) -> bool:
        routed = self._coordinator.request_at(instance, message.request)
        early = routed is not None and routed.state is RequestState.PREFILLING and routed.prompt_owed
        if routed is not None and instance is routed.decoder and message.attempt == routed.attempt:
            self._note_copy(routed, instance, message)
            if early:
                self._coordinator.break_attempt(routed, instance)  # no instance would deliver the prompt log-probabilities
                return True
        return self._reported_by_decoder(instance, message.request, message.attempt, RequestFact.ADOPTED)

    def _note_copy(self, routed: RoutedRequest, decoder: ClusterInstance, message: Adopted) -> None:
        """Check whether the prompt has arrived: the decode instance continues after the last offer. If less than half has, it
        was computed in vain."""
        source = routed.source
        if routed.state is not RequestState.HANDING or source is None:
            return
        routed.copied = 2 * message.tokens >= routed.tokens - 1
        if source not in self._coordinator.membership.instances:
            return
        if routed.copied:
            decoder.paths.arrived(source)
        elif not routed.denied and decoder.paths.in_vain(source, self._coordinator.now, message.fault):
            self._stats.paths_given_up += 1
        self._coordinator.membership.note_paths(decoder)

    def _on_offer(self, instance: ClusterInstance, offer: Offer) -> bool:
        routed = self._current_attempt(instance, offer.request, offer.attempt)
        if routed is None or instance is not routed.prefill:
            return False
        if not offer.last or routed.state is not RequestState.PREFILLING:
            self._coordinator.advance(routed, RequestFact.PREFILLED if offer.last else RequestFact.OFFERED, offer)
            return False
        if len(routed.open[routed.leader]) <= routed.base:
            self._coordinator.break_attempt(routed, instance)  # the decode instance's token has not arrived
            return True
        if routed.usage is None:
            routed.led = routed.leader
            routed.usage = (offer.cached_tokens, offer.host_tokens, offer.storage_tokens)
        if routed.withdrawn:  # the usage that the ends waited for has arrived
            self._withdrawal.end(routed, list(routed.withdrawn.items()))
        else:
            self._coordinator.advance(routed, RequestFact.PREFILLED, offer)
        return True

    def _on_released(self, instance: ClusterInstance, message: Released) -> bool:
        routed = self._current_attempt(instance, message.request, message.attempt)
        if routed is not None and instance is routed.prefill:
            self._coordinator.advance(routed, RequestFact.RELEASED, message)
        return False

    def _reported_by_decoder(self, instance: ClusterInstance, request: RequestId, attempt: int, fact: RequestFact) -> bool:
        routed = self._current_attempt(instance, request, attempt)
        if routed is None or instance is not routed.decoder:
            return False
        self._coordinator.advance(routed, fact)
        return routed.state is RequestState.QUEUED

    def _current_attempt(self, instance: ClusterInstance, request: RequestId, attempt: int) -> RoutedRequest | None:
        """The routed request, if this instance has its present attempt."""
        routed = self._coordinator.request_at(instance, request)
        if routed is not None and routed.attempt == attempt:
            return routed
        self._stats.late_facts += 1
        return None
