"""What instances say, as facts of the trip's table. One of an attempt that is over, or from an instance that has no part in
it, is counted and changes nothing.

A hearer answers whether requests in line may have a better chance now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from baton.config import RouterConfig
from baton.core.cluster.coordinator import Coordinator
from baton.core.cluster.handoff_table import TripFact, TripState
from baton.core.cluster.member import Member
from baton.core.cluster.trip import Trip
from baton.core.cluster.withdrawal import Withdrawal
from baton.protocol.control import InstanceStats, RefusedRequest
from baton.protocol.handoff import Adopted, AskRelease, Expecting, Offer, Released
from baton.protocol.ids import Instant, RequestId
from baton.protocol.node import Beat

NEVER: Final = ("never_fits", "never_planned", "never_queued")
NO_ROOM: Final = ("no_room", "queue_full", "queue_tokens_full")
"""Tried again when the instance has said anew how much room it has."""
NOT_NOW: Final = ("draining", "paused", "worker_gone")
"""Refusals that are about the instance, not about the request."""


class Reports:
    __slots__ = ("_config", "_coordinator", "_stats", "_withdrawal", "hearers")

    def __init__(self, config: RouterConfig, coordinator: Coordinator, withdrawal: Withdrawal) -> None:
        self._config = config
        self._withdrawal = withdrawal
        self._coordinator = coordinator
        self._stats = coordinator.stats
        self.hearers: dict[type[Any], Callable[[Member, Any], bool]] = {
            Beat: self._on_beat,
            InstanceStats: self._on_stats,
            RefusedRequest: self._on_refused,
            Expecting: self._on_expecting,
            Offer: self._on_offer,
            AskRelease: self._on_ask,
            Released: self._on_released,
            Adopted: self._on_adopted,
        }

    def _on_beat(self, member: Member, beat: Beat) -> bool:
        now = self._coordinator.now
        has_room = self._coordinator.membership.on_beat(member, beat, now)
        for request in beat.preempted:
            if (trip := self._coordinator.trip_at(member, request)) is not None:
                trip.preempted[member.name] = Instant(now + self._config.preempted_seconds)
        return has_room

    def _on_stats(self, member: Member, stats: InstanceStats) -> bool:
        changed = member.mode != stats.mode
        if changed:
            self._coordinator.membership.set_mode(member, stats.mode)
        return changed

    def _on_refused(self, member: Member, message: RefusedRequest) -> bool:
        trip = self._leg(member, message.request, message.attempt)
        if trip is None:
            return False
        refused, now = message.refused, self._coordinator.now
        self._stats.refused[refused.reason] += 1
        until = Instant(now + self._config.again_seconds)
        if refused.reason in NEVER:
            trip.unfit[member.name] = None
            trip.refused = refused
        elif refused.reason in NO_ROOM:
            trip.short[member.name] = member.beat
            member.short_for = True
        else:
            trip.avoid(member.name, until, now)
        if refused.reason in NOT_NOW:
            member.held_until = until
            self._coordinator.membership.roster.touch(member)
        self._coordinator.advance(trip, TripFact.REFUSED)
        return True

    def _on_expecting(self, member: Member, message: Expecting) -> bool:
        return self._told_by_home(member, message.request, message.attempt, TripFact.RESERVED)

    def _on_ask(self, member: Member, message: AskRelease) -> bool:
        return self._told_by_home(member, message.request, message.attempt, TripFact.ASKED)

    def _on_adopted(self, member: Member, message: Adopted) -> bool:
        trip = self._coordinator.trip_at(member, message.request)
        early = trip is not None and trip.state is TripState.PREFILLING and trip.prompt_owed
        if trip is not None and member is trip.home and message.attempt == trip.attempt:
            self._note_copy(trip, member, message)
            if early:
                self._coordinator.break_leg(trip, member)  # nobody would tell what the model thought of the prompt
                return True
        return self._told_by_home(member, message.request, message.attempt, TripFact.ADOPTED)

    def _note_copy(self, trip: Trip, home: Member, message: Adopted) -> None:
        """All was offered to home, and it goes on: has its prompt come? Of which less than half has was computed in vain."""
        source = trip.source
        if trip.state is not TripState.HANDING or source is None:
            return
        trip.copied = 2 * message.tokens >= trip.tokens - 1
        if source not in self._coordinator.membership.members:
            return
        if trip.copied:
            home.paths.came(source)
        elif not trip.denied and home.paths.in_vain(source, self._coordinator.now, message.fault):
            self._stats.paths_given_up += 1
        self._coordinator.membership.note_paths(home)

    def _on_offer(self, member: Member, offer: Offer) -> bool:
        trip = self._leg(member, offer.request, offer.attempt)
        if trip is None or member is not trip.prefill:
            return False
        if not offer.last or trip.state is not TripState.PREFILLING:
            self._coordinator.advance(trip, TripFact.PREFILLED if offer.last else TripFact.OFFERED, offer)
            return False
        if len(trip.open[trip.leader]) <= trip.base:
            self._coordinator.break_leg(trip, member)  # its token has not come
            return True
        if trip.usage is None:
            trip.led = trip.leader
            trip.usage = (offer.cached_tokens, offer.host_tokens, offer.storage_tokens)
        if trip.withdrawn:  # that was waited for
            self._withdrawal.end(trip, list(trip.withdrawn.items()))
        else:
            self._coordinator.advance(trip, TripFact.PREFILLED, offer)
        return True

    def _on_released(self, member: Member, message: Released) -> bool:
        trip = self._leg(member, message.request, message.attempt)
        if trip is not None and member is trip.prefill:
            self._coordinator.advance(trip, TripFact.RELEASED, message)
        return False

    def _told_by_home(self, member: Member, request: RequestId, attempt: int, fact: TripFact) -> bool:
        trip = self._leg(member, request, attempt)
        if trip is None or member is not trip.home:
            return False
        self._coordinator.advance(trip, fact)
        return trip.state is TripState.QUEUED

    def _leg(self, member: Member, request: RequestId, attempt: int) -> Trip | None:
        """The trip, if this instance has the present attempt of it."""
        trip = self._coordinator.trip_at(member, request)
        if trip is not None and trip.attempt == attempt:
            return trip
        self._stats.late_facts += 1
        return None
