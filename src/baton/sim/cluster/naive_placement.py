"""The rules of core/cluster/placement.py written as a sort over all instances: slow, and easy to read. It is the oracle of the
fast search: tests and the simulator compare the two choice by choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from baton.config import RouterConfig
from baton.core.cluster.choice import Choice, Shortage
from baton.core.cluster.closed import Closed
from baton.core.cluster.member import Member
from baton.core.cluster.membership import Membership
from baton.core.cluster.placement import Placement
from baton.core.cluster.roster import STEPS
from baton.core.cluster.router import Router
from baton.core.cluster.trip import Trip
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockKey, Instant

ROLES = ("prefill", "mixed", "decode")


class NaivePlacement:
    def __init__(self, config: RouterConfig, membership: Membership, placement: Placement) -> None:
        """`placement` is asked what a hand-off costs, and for keys of blocks."""
        self._config = config
        self._membership = membership
        self._placement = placement

    def choose(self, trip: Trip, now: Instant, closed: Closed, rng: Random) -> Choice | Shortage:
        members = list(self._membership.members.values())
        if members and not any(self._could(member, trip) for member in members):
            return Shortage.LOST if self._membership.lost_could(trip.tokens_max, trip.unfit, now) else Shortage.NEVER
        usable = [member for member in members if self._is_usable(member, now)]
        tiers, prefills = self._roles(trip, usable)
        homes = [member for tier in tiers for member in tier]
        if not homes:
            return Shortage.NOBODY
        left = _settled([member for member in homes if not trip.avoids(member, now)], now)
        if not left:
            return Shortage.AVOIDED
        pairs = bool(prefills)
        prefills = _settled([member for member in prefills if not trip.avoids(member, now)], now)
        keys = self._placement.keys(trip) if pairs or self._config.policy == "prefix" else []
        settled = left[0].inhibited_until <= now
        best = self._prefill_for(trip, prefills, keys, now, closed, rng if prefills else None)

        def option(home: Member) -> Choice | None:
            if trip.is_short(home) or closed.is_closed(home):
                return None
            return self._option(trip, home, self._uncached(home, trip, keys), pairs, prefills, best, keys, now, closed)

        for preempted in (False, True):
            for number, tier in enumerate(tiers):
                able = [m for m in left if m in tier and trip.was_preempted(m, now) == preempted]
                ordered = sorted(able, key=lambda member: self._key(member, self._uncached(member, trip, keys)))
                if not preempted and self._config.policy == "two_choices":
                    roles = self._tier_roles(trip, number, usable)
                    ordered = (
                        self._drawn(roles, [m for m in usable if (m.inhibited_until <= now) == settled], able, rng) + ordered
                    )
                for home in ordered:
                    if (choice := option(home)) is not None:
                        return choice
        if pairs and best is None and any(member.hello.role == "decode" for member in left):
            return Shortage.PREFILL if prefills else Shortage.AVOIDED
        return Shortage.ROOM

    # Who could have it

    @staticmethod
    def _could(member: Member, trip: Trip) -> bool:
        return member.name not in trip.unfit and member.can_hold(trip.tokens_max)

    def _is_usable(self, member: Member, now: Instant) -> bool:
        suspect = member.is_suspect(now, self._config.suspect_seconds)
        return member.mode == "serving" and member.held_until <= now and not suspect

    def _roles(self, trip: Trip, usable: list[Member]) -> tuple[list[list[Member]], list[Member]]:
        alone = [member for member in usable if member.hello.role == "prefill" and self._could(member, trip)]
        homes = [member for member in usable if member.hello.role != "prefill" and self._could(member, trip)]
        if trip.tokens_left <= 1 and alone:
            mixed = [member for member in homes if member.hello.role == "mixed"]
            return [alone + mixed, [member for member in homes if member.hello.role == "decode"]], []
        if not homes:
            return [alone], []
        prefills = [m for m in usable if m.hello.role == "prefill" and m.hello.peers and m.name not in trip.unfit]
        return [homes], [member for member in prefills if member.can_hold(trip.tokens + 1)]

    def _tier_roles(self, trip: Trip, number: int, usable: list[Member]) -> tuple[str, ...]:
        alone = any(member.hello.role == "prefill" and self._could(member, trip) for member in usable)
        homes = any(member.hello.role != "prefill" and self._could(member, trip) for member in usable)
        if trip.tokens_left <= 1 and alone:
            return (("prefill", "mixed"), ("decode",))[number]
        return ("mixed", "decode") if homes else ("prefill",)

    # Order

    def _uncached(self, member: Member, trip: Trip, keys: Sequence[BlockKey]) -> int:
        cached = 0
        for key in keys:
            if not self._membership.index.has(member.number, key):
                break
            cached += 1
        return max(1, trip.tokens - cached * member.hello.ready.block_size)

    def _key(self, member: Member, uncached: int) -> tuple[int, int, int]:
        match self._config.policy:
            case "prefix":
                return member.load + uncached, member.chosen, member.number
            case "round_robin":
                return 0, member.chosen, member.number
        return member.load, member.chosen, member.number

    def _drawn(self, roles: Sequence[str], usable: list[Member], able: list[Member], rng: Random) -> list[Member]:
        """With two choices: the less loaded of two that are drawn from all. Empty: it cannot have the request."""
        drawn_from = [m for role in roles for m in sorted(usable, key=lambda each: each.number) if m.hello.role == role]
        if len(drawn_from) <= 2:
            return []
        two = [drawn_from[place] for place in rng.sample(range(len(drawn_from)), 2)]
        better = min(two, key=lambda member: (member.load, member.chosen, member.number))
        return [better] if better in able else []

    # Room

    def _option(
        self,
        trip: Trip,
        home: Member,
        uncached: int,
        pairs: bool,
        prefills: list[Member],
        best: Member | None,
        keys: Sequence[BlockKey],
        now: Instant,
        closed: Closed,
    ) -> Choice | None:
        size = home.hello.ready.block_size
        blocks = -(-(uncached + 1) // size) + len(trip.open) - 1
        room = _has_room(home, blocks)
        near = prefills
        if home.paths:
            near = [member for member in prefills if home.paths.may_read(member.session, now)]
            best = self._prefill_for(trip, near, keys, now, closed, None)
        unread = bool(prefills) and not near
        stays = self._placement.stays(home, uncached, prefill=best is not None)
        if not pairs or home.hello.role != "decode" or unread or stays:
            return Choice(home, None, uncached, blocks, not room) if room or self._may_wait(home, trip) else None
        if best is None or not room:
            return None
        return Choice(home, best, self._uncached(best, trip, keys), blocks, waits=False)

    def _prefill_for(
        self, trip: Trip, prefills: list[Member], keys: Sequence[BlockKey], now: Instant, closed: Closed, rng: Random | None
    ) -> Member | None:
        """`rng`: with two choices, two are drawn."""

        def has_room(member: Member) -> bool:
            if member.prompts < 1 + self._config.waiting_prompts_max:
                return True
            return member.prompt_tokens + self._uncached(member, trip, keys) <= STEPS * member.hello.step_tokens

        free = [m for m in prefills if has_room(m) and not trip.is_short(m) and not closed.is_closed_prefill(m)]
        ordered = sorted(
            free, key=lambda member: (trip.was_preempted(member, now), self._key(member, self._uncached(member, trip, keys)))
        )
        if rng is not None and self._config.policy == "two_choices":
            settled = prefills[0].inhibited_until <= now
            usable = [m for m in self._membership.members.values() if self._is_usable(m, now) and m.hello.peers]
            able = [member for member in free if not trip.was_preempted(member, now)]
            same = [member for member in usable if (member.inhibited_until <= now) == settled]
            ordered = self._drawn(("prefill",), same, able, rng) + ordered
        return ordered[0] if ordered else None

    def _may_wait(self, member: Member, trip: Trip) -> bool:
        """May one more wait there? Those that are less urgent are no reason against it."""
        ahead = sum(order <= trip.order for order in member.overdrawn.values())
        return ahead < self._config.waiting_prompts_max and len(member.overdrawn) < self._config.overdrawn_max


def _has_room(member: Member, blocks: int) -> bool:
    """One that has nothing else can always begin."""
    if not member.sequences and member.beat.blocks_available >= member.hello.ready.blocks:
        return True
    return member.slots_free > 0 and member.blocks_available >= blocks


def _settled(members: list[Member], now: Instant) -> list[Member]:
    """Those that are not lost again and again, if there are any."""
    return [member for member in members if member.inhibited_until <= now] or members


class CheckedPlacement:
    """A placement whose every choice is compared with the naive one."""

    def __init__(self, config: RouterConfig, membership: Membership, placement: Placement, rng: Random) -> None:
        """`rng`: the one that the placement draws from."""
        self._placement = placement
        self._naive = NaivePlacement(config, membership, placement)
        self._rng = rng
        self.compared = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._placement, name)

    def place(self, trip: Trip, now: Instant, closed: Closed) -> Choice | Shortage:
        self.compared += 1
        rng = Random()
        rng.setstate(self._rng.getstate())
        wanted = self._naive.choose(trip, now, closed, rng)
        found = self._placement.place(trip, now, closed)
        if found != wanted:
            raise InvariantBroken(f"{trip!r} is placed as {found}, sorted it is {wanted}", invariant=61)
        return found


def check_placement(router: Router, config: RouterConfig, rng: Random) -> CheckedPlacement:
    """61: from now on every choice of this router is compared. `rng`: the one that it was made with."""
    checked = CheckedPlacement(config, router.membership, router._placement, rng)
    router._dispatch._placement = checked  # type: ignore[assignment]
    return checked
