"""The rules of core/cluster/placement.py written as a sort over all instances: slow, and easy to read. It is the oracle of the
fast search: tests and the simulator compare the two choice by choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from baton.config import RouterConfig
from baton.core.cluster.choice import Choice, ClusterShortage
from baton.core.cluster.closed import Closed
from baton.core.cluster.cluster_instance import ClusterInstance
from baton.core.cluster.membership import Membership
from baton.core.cluster.placement import Placement
from baton.core.cluster.roster import STEPS
from baton.core.cluster.routed_request import RoutedRequest
from baton.core.cluster.router import Router
from baton.core.kv.marks import Mark
from baton.errors import InvariantBroken
from baton.protocol.ids import Instant, RequestId

Way = Literal["room", "preempt", "whole"]
"""A choice with room; a hand-off that preempts; a hand-off that waits whole."""
ROLES = ("prefill", "mixed", "decode")


class NaivePlacement:
    def __init__(
        self,
        config: RouterConfig,
        membership: Membership,
        placement: Placement,
        routed_requests: Mapping[RequestId, RoutedRequest],
    ) -> None:
        """`placement` provides the cost of a hand-off, and marked blocks. `routed_requests`: all open requests."""
        self._config = config
        self._routed_requests = routed_requests
        self._membership = membership
        self._placement = placement

    def choose(self, routed: RoutedRequest, now: Instant, closed: Closed) -> Choice | ClusterShortage:
        instances = list(self._membership.instances.values())
        if instances and not any(self._could(instance, routed) for instance in instances):
            return (
                ClusterShortage.LOST
                if self._membership.lost_could(routed.tokens_max, routed.unfit, now)
                else ClusterShortage.NEVER
            )
        usable = [instance for instance in instances if self._is_usable(instance, now)]
        tiers, prefills = self._roles(routed, usable)
        decoders = [instance for tier in tiers for instance in tier]
        if not decoders:
            return ClusterShortage.NOBODY
        left = _settled([instance for instance in decoders if not routed.avoids(instance, now)], now)
        if not left:
            return ClusterShortage.AVOIDED
        pairs = bool(prefills)
        prefills = _settled([instance for instance in prefills if not routed.avoids(instance, now)], now)
        marks = self._placement.marks(routed) if pairs or self._config.policy == "prefix" else []
        best = self._prefill_for(routed, prefills, marks, now, closed)

        def option(decoder: ClusterInstance, way: Way) -> Choice | None:
            if routed.is_short(decoder) or closed.is_closed(decoder):
                return None
            uncached = self._uncached(decoder, routed, marks)
            return self._option(routed, decoder, uncached, pairs, prefills, best, marks, now, closed, way)

        since = routed.no_room_since
        starves = best is not None and since is not None and now >= since + self._config.handoff_room_seconds
        ways: tuple[Way, ...] = ("room", "preempt", "whole") if starves else ("room", "preempt")
        for way in ways:
            for preempted in (False, True):
                for tier in tiers:
                    able = [m for m in left if m in tier and routed.was_preempted(m, now) == preempted]
                    ordered = sorted(able, key=lambda instance: self._key(instance, self._uncached(instance, routed, marks)))
                    for decoder in ordered:
                        if (choice := option(decoder, way)) is not None:
                            return choice
        if pairs and best is None and any(instance.hello.role == "decode" for instance in left):
            return ClusterShortage.PREFILL if prefills else ClusterShortage.AVOIDED
        return ClusterShortage.ROOM

    # Able instances

    @staticmethod
    def _could(instance: ClusterInstance, routed: RoutedRequest) -> bool:
        return instance.name not in routed.unfit and instance.can_hold(routed.tokens_max)

    def _is_usable(self, instance: ClusterInstance, now: Instant) -> bool:
        suspect = instance.is_suspect(now, self._config.suspect_seconds)
        return instance.mode == "serving" and instance.held_until <= now and not suspect

    def _roles(
        self, routed: RoutedRequest, usable: list[ClusterInstance]
    ) -> tuple[list[list[ClusterInstance]], list[ClusterInstance]]:
        alone = [instance for instance in usable if instance.hello.role == "prefill" and self._could(instance, routed)]
        decoders = [instance for instance in usable if instance.hello.role != "prefill" and self._could(instance, routed)]
        if routed.tokens_left <= 1 and alone:
            mixed = [instance for instance in decoders if instance.hello.role == "mixed"]
            return [alone + mixed, [instance for instance in decoders if instance.hello.role == "decode"]], []
        if not decoders:
            return [alone], []
        prefills = [m for m in usable if m.hello.role == "prefill" and m.hello.peers and m.name not in routed.unfit]
        return [decoders], [instance for instance in prefills if instance.can_hold(routed.tokens + 1)]

    # Order

    def _uncached(self, instance: ClusterInstance, routed: RoutedRequest, marks: Sequence[Mark]) -> int:
        cached = max([place for place, key in marks if self._membership.index.has(instance.number, key)], default=0)
        return max(1, routed.tokens - cached * instance.hello.ready.block_size)

    def _key(self, instance: ClusterInstance, uncached: int) -> tuple[int, int, int]:
        return instance.load + (uncached if self._config.policy == "prefix" else 0), instance.chosen, instance.number

    # Room

    def _option(
        self,
        routed: RoutedRequest,
        decoder: ClusterInstance,
        uncached: int,
        pairs: bool,
        prefills: list[ClusterInstance],
        best: ClusterInstance | None,
        marks: Sequence[Mark],
        now: Instant,
        closed: Closed,
        way: Way,
    ) -> Choice | None:
        size = decoder.hello.ready.block_size
        blocks = -(-(uncached + 1) // size) + len(routed.open) - 1
        room = _has_room(decoder, blocks)
        near = prefills
        if decoder.paths:
            near = [instance for instance in prefills if decoder.paths.may_read(instance.session, now)]
            best = self._prefill_for(routed, near, marks, now, closed)
        unread = bool(prefills) and not near
        stays = self._placement.stays(decoder, uncached, prefill=best is not None)
        if not pairs or decoder.hello.role != "decode" or unread or stays:
            return Choice(decoder, None, uncached, blocks, not room) if room or self._may_wait(decoder, routed) else None
        others = decoder.hello.ready.slots - decoder.beat.slots_free - decoder.slots_since > decoder.sequences
        if way == "whole" and not room and others and self._may_wait(decoder, routed):
            return Choice(decoder, None, uncached, blocks, waits=True)
        urgent = way == "preempt" and self._may_wait(decoder, routed) and self._could_preempt(decoder, routed, blocks)
        if best is None or not (room or urgent):
            return None
        return Choice(decoder, best, self._uncached(best, routed, marks), blocks, waits=not room)

    def _prefill_for(
        self,
        routed: RoutedRequest,
        prefills: list[ClusterInstance],
        marks: Sequence[Mark],
        now: Instant,
        closed: Closed,
    ) -> ClusterInstance | None:
        def has_room(instance: ClusterInstance) -> bool:
            if instance.prompts < 1 + self._config.waiting_prompts_max:
                return True
            return instance.prompt_tokens + self._uncached(instance, routed, marks) <= STEPS * instance.hello.step_tokens

        free = [m for m in prefills if has_room(m) and not routed.is_short(m) and not closed.is_closed_prefill(m)]
        ordered = sorted(
            free,
            key=lambda instance: (
                routed.was_preempted(instance, now),
                self._key(instance, self._uncached(instance, routed, marks)),
            ),
        )
        return ordered[0] if ordered else None

    def _may_wait(self, instance: ClusterInstance, routed: RoutedRequest) -> bool:
        """Whether one more request may wait there. Less urgent ones are no obstacle."""
        ahead = sum(order <= routed.order for order in instance.over_capacity.values())
        return ahead < self._config.waiting_prompts_max and len(instance.over_capacity) < self._config.overdrawn_max

    def _could_preempt(self, decoder: ClusterInstance, routed: RoutedRequest, blocks: int) -> bool:
        """Do less urgent requests have enough blocks there?"""
        others = [self._routed_requests[request] for request in decoder.assigned]
        held = sum(other.placed_blocks for other in others if other.decoder is decoder and other.order[0] > routed.order[0])
        held = max(held, sum(blocks for priority, blocks in decoder.beat.held if priority > routed.order[0]))
        return held > 0 and held + max(0, decoder.blocks_available) >= blocks


def _has_room(instance: ClusterInstance, blocks: int) -> bool:
    """Whether the instance has room for the request. An idle instance can always begin."""
    if not instance.sequences and instance.beat.blocks_available >= instance.hello.ready.blocks:
        return True
    return instance.slots_free > 0 and instance.blocks_available >= blocks


def _settled(instances: list[ClusterInstance], now: Instant) -> list[ClusterInstance]:
    """The instances that are not lost repeatedly, if there are any."""
    return [instance for instance in instances if instance.inhibited_until <= now] or instances


class CheckedPlacement:
    """A placement that compares each of its choices with the naive one."""

    def __init__(self, config: RouterConfig, router: Router, saw: Callable[[str], None]) -> None:
        self._placement = placement = router._placement
        self._saw = saw
        self._naive = NaivePlacement(config, router.membership, placement, router.coordinator.routed_requests)
        self.compared = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._placement, name)

    def place(self, routed: RoutedRequest, now: Instant, closed: Closed) -> Choice | ClusterShortage:
        self.compared += 1
        wanted = self._naive.choose(routed, now, closed)
        found = self._placement.place(routed, now, closed)
        if found != wanted:
            raise InvariantBroken(f"{routed!r} is placed as {found}, sorted it is {wanted}", invariant=61)
        if isinstance(found, Choice) and found.waits and routed.no_room_since is not None and found.decoder.is_shared:
            self._saw("a hand-off without room waited whole")
        if isinstance(found, Choice) and found.waits and found.prefill is not None:
            self._saw("an urgent reservation was sent without room")
        return found


def check_placement(router: Router, config: RouterConfig, saw: Callable[[str], None] = lambda state: None) -> CheckedPlacement:
    """61: from now on every choice of this router is compared. `saw` is called with rare states."""
    checked = CheckedPlacement(config, router, saw)
    router._dispatch._placement = checked  # type: ignore[assignment]
    return checked
