"""The rules of core/cluster/placement.py written as a sort over all instances: slow, and easy to read. It is the oracle of the
fast search: tests and the simulator compare the two choice by choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.config import RouterConfig
from baton.core.cluster.choice import Choice, ClusterShortage
from baton.core.cluster.closed import Closed
from baton.core.cluster.cluster_instance import ClusterInstance
from baton.core.cluster.membership import Membership
from baton.core.cluster.placement import Placement
from baton.core.cluster.roster import STEPS
from baton.core.cluster.routed_request import RoutedRequest
from baton.core.cluster.router import Router
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockKey, Instant

ROLES = ("prefill", "mixed", "decode")


class NaivePlacement:
    def __init__(self, config: RouterConfig, membership: Membership, placement: Placement) -> None:
        """`placement` provides the cost of a hand-off, and keys of blocks."""
        self._config = config
        self._membership = membership
        self._placement = placement

    def choose(self, client_request: RoutedRequest, now: Instant, closed: Closed) -> Choice | ClusterShortage:
        instances = list(self._membership.instances.values())
        if instances and not any(self._could(member, client_request) for member in instances):
            return (
                ClusterShortage.LOST
                if self._membership.lost_could(client_request.tokens_max, client_request.unfit, now)
                else ClusterShortage.NEVER
            )
        usable = [member for member in instances if self._is_usable(member, now)]
        tiers, prefills = self._roles(client_request, usable)
        decoders = [member for tier in tiers for member in tier]
        if not decoders:
            return ClusterShortage.NOBODY
        left = _settled([member for member in decoders if not client_request.avoids(member, now)], now)
        if not left:
            return ClusterShortage.AVOIDED
        pairs = bool(prefills)
        prefills = _settled([member for member in prefills if not client_request.avoids(member, now)], now)
        keys = self._placement.keys(client_request) if pairs or self._config.policy == "prefix" else []
        best = self._prefill_for(client_request, prefills, keys, now, closed)

        def option(decoder: ClusterInstance) -> Choice | None:
            if client_request.is_short(decoder) or closed.is_closed(decoder):
                return None
            return self._option(
                client_request, decoder, self._uncached(decoder, client_request, keys), pairs, prefills, best, keys, now, closed
            )

        for preempted in (False, True):
            for tier in tiers:
                able = [m for m in left if m in tier and client_request.was_preempted(m, now) == preempted]
                ordered = sorted(able, key=lambda member: self._key(member, self._uncached(member, client_request, keys)))
                for decoder in ordered:
                    if (choice := option(decoder)) is not None:
                        return choice
        if pairs and best is None and any(member.hello.role == "decode" for member in left):
            return ClusterShortage.PREFILL if prefills else ClusterShortage.AVOIDED
        return ClusterShortage.ROOM

    # Able instances

    @staticmethod
    def _could(member: ClusterInstance, client_request: RoutedRequest) -> bool:
        return member.name not in client_request.unfit and member.can_hold(client_request.tokens_max)

    def _is_usable(self, member: ClusterInstance, now: Instant) -> bool:
        suspect = member.is_suspect(now, self._config.suspect_seconds)
        return member.mode == "serving" and member.held_until <= now and not suspect

    def _roles(
        self, client_request: RoutedRequest, usable: list[ClusterInstance]
    ) -> tuple[list[list[ClusterInstance]], list[ClusterInstance]]:
        alone = [member for member in usable if member.hello.role == "prefill" and self._could(member, client_request)]
        decoders = [member for member in usable if member.hello.role != "prefill" and self._could(member, client_request)]
        if client_request.tokens_left <= 1 and alone:
            mixed = [member for member in decoders if member.hello.role == "mixed"]
            return [alone + mixed, [member for member in decoders if member.hello.role == "decode"]], []
        if not decoders:
            return [alone], []
        prefills = [m for m in usable if m.hello.role == "prefill" and m.hello.peers and m.name not in client_request.unfit]
        return [decoders], [member for member in prefills if member.can_hold(client_request.tokens + 1)]

    # Order

    def _uncached(self, member: ClusterInstance, client_request: RoutedRequest, keys: Sequence[BlockKey]) -> int:
        cached = 0
        for key in keys:
            if not self._membership.index.has(member.number, key):
                break
            cached += 1
        return max(1, client_request.tokens - cached * member.hello.ready.block_size)

    def _key(self, member: ClusterInstance, uncached: int) -> tuple[int, int, int]:
        return member.load + (uncached if self._config.policy == "prefix" else 0), member.chosen, member.number

    # Room

    def _option(
        self,
        client_request: RoutedRequest,
        decoder: ClusterInstance,
        uncached: int,
        pairs: bool,
        prefills: list[ClusterInstance],
        best: ClusterInstance | None,
        keys: Sequence[BlockKey],
        now: Instant,
        closed: Closed,
    ) -> Choice | None:
        size = decoder.hello.ready.block_size
        blocks = -(-(uncached + 1) // size) + len(client_request.open) - 1
        room = _has_room(decoder, blocks)
        near = prefills
        if decoder.paths:
            near = [member for member in prefills if decoder.paths.may_read(member.session, now)]
            best = self._prefill_for(client_request, near, keys, now, closed)
        unread = bool(prefills) and not near
        stays = self._placement.stays(decoder, uncached, prefill=best is not None)
        if not pairs or decoder.hello.role != "decode" or unread or stays:
            return (
                Choice(decoder, None, uncached, blocks, not room) if room or self._may_wait(decoder, client_request) else None
            )
        if best is None or not room:
            return None
        return Choice(decoder, best, self._uncached(best, client_request, keys), blocks, waits=False)

    def _prefill_for(
        self,
        client_request: RoutedRequest,
        prefills: list[ClusterInstance],
        keys: Sequence[BlockKey],
        now: Instant,
        closed: Closed,
    ) -> ClusterInstance | None:
        def has_room(member: ClusterInstance) -> bool:
            if member.prompts < 1 + self._config.waiting_prompts_max:
                return True
            return member.prompt_tokens + self._uncached(member, client_request, keys) <= STEPS * member.hello.step_tokens

        free = [m for m in prefills if has_room(m) and not client_request.is_short(m) and not closed.is_closed_prefill(m)]
        ordered = sorted(
            free,
            key=lambda member: (
                client_request.was_preempted(member, now),
                self._key(member, self._uncached(member, client_request, keys)),
            ),
        )
        return ordered[0] if ordered else None

    def _may_wait(self, member: ClusterInstance, client_request: RoutedRequest) -> bool:
        """May one more request wait there? Less urgent ones are no obstacle."""
        ahead = sum(order <= client_request.order for order in member.over_capacity.values())
        return ahead < self._config.waiting_prompts_max and len(member.over_capacity) < self._config.overdrawn_max


def _has_room(member: ClusterInstance, blocks: int) -> bool:
    """An idle instance can always begin."""
    if not member.sequences and member.beat.blocks_available >= member.hello.ready.blocks:
        return True
    return member.slots_free > 0 and member.blocks_available >= blocks


def _settled(instances: list[ClusterInstance], now: Instant) -> list[ClusterInstance]:
    """The instances that are not lost again and again, if there are any."""
    return [member for member in instances if member.inhibited_until <= now] or instances


class CheckedPlacement:
    """A placement whose every choice is compared with the naive one."""

    def __init__(self, config: RouterConfig, membership: Membership, placement: Placement) -> None:
        self._placement = placement
        self._naive = NaivePlacement(config, membership, placement)
        self.compared = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._placement, name)

    def place(self, client_request: RoutedRequest, now: Instant, closed: Closed) -> Choice | ClusterShortage:
        self.compared += 1
        wanted = self._naive.choose(client_request, now, closed)
        found = self._placement.place(client_request, now, closed)
        if found != wanted:
            raise InvariantBroken(f"{client_request!r} is placed as {found}, sorted it is {wanted}", invariant=61)
        return found


def check_placement(router: Router, config: RouterConfig) -> CheckedPlacement:
    """61: from now on every choice of this router is compared."""
    checked = CheckedPlacement(config, router.membership, router._placement)
    router._dispatch._placement = checked  # type: ignore[assignment]
    return checked
