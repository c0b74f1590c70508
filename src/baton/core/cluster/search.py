"""Finds the best instance for a request: the same one as sorting all of them by the policy's key, after a look at a few.

    key     (load + uncached tokens, chosen longest ago, number) with policy "prefix"; without the uncached tokens otherwise

With "prefix", depths at which cached prefixes end are gone through from the deepest on. Holders of a prefix are nested, so an
instance that was not seen at a greater depth has exactly this one. At one depth the best instance is the least loaded one that
is acceptable, and what is more loaded is not looked at. Instances come from the smallest collection that has all that matter at
this depth: those that have the prefix, those with enough room, or all, by load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import merge
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.config import RouterConfig
from baton.core.cluster.member import Entry, Member
from baton.core.cluster.prefix_index import Holders, PrefixIndex
from baton.core.cluster.roster import Group, Roster
from baton.protocol.ids import BlockKey

if TYPE_CHECKING:
    from random import Random

FEW: Final = 64
"""So many instances are looked at one after the other; more of them by load, which ends early."""

Key = tuple[int, int, int]
Accept = Callable[[Member, int], bool]
"""May this instance have the request, of which so many tokens are not cached there?"""
Level = tuple[int, Holders | None]
"""A depth in blocks, and the instances that have at least so much. None: all."""


class Candidate(NamedTuple):
    key: Key
    member: Member
    uncached: int
    "Tokens that it would have to compute."


class Pool(NamedTuple):
    """Whom to choose from."""

    roles: tuple[str, ...]
    settled: bool
    waits: bool
    "Also those without room, at which the request may wait."
    urgent: bool = False
    "Also those at which only urgent requests may wait."


class Wish(NamedTuple):
    """What is looked for."""

    keys: Sequence[BlockKey]
    "Of the prompt's blocks; none where prefixes do not matter."
    levels: list[Level]
    "Of those keys, deepest first."
    tokens: int
    size: int
    "Of a block."
    more_blocks: int
    "Beside those of the tokens."
    accept: Accept
    floor: int = 0
    "Only instances that have so many of the first blocks."

    def uncached(self, depth: int) -> int:
        return max(1, self.tokens - depth * self.size)


class Search:
    __slots__ = ("_draws", "_index", "_rng", "_roster", "by_prefix")

    def __init__(self, config: RouterConfig, roster: Roster, index: PrefixIndex, rng: Random) -> None:
        self._roster = roster
        self._index = index
        self._rng = rng
        self.by_prefix = config.policy == "prefix"
        self._draws = config.policy == "two_choices"

    def levels(self, keys: Sequence[BlockKey]) -> list[Level]:
        """With other policies depth does not matter for the order: one level, at which no instance is deeper."""
        if self.by_prefix:
            return [*self._index.levels(keys), (0, None)]
        return [(next(self._index.levels(keys), (0, None))[0], None)]

    def home(self, pool: Pool, wish: Wish) -> Candidate | None:
        """The best instance that begins the request, or at which it may wait."""
        best: Candidate | None = None
        done: Holders = {}
        least = self._least_loaded(pool)
        if least is None or self._is_full(pool, wish):
            return None
        for depth, holders in self._levels(wish):
            uncached = wish.uncached(depth)
            if best is not None and self._key(least, uncached) >= best.key:
                break
            if holders is not None and len(holders) <= FEW:
                best = self._among(self._members(holders, pool), wish, uncached, done, best)
            else:
                few, groups = self._choose(pool, -(-(uncached + 1) // wish.size) + wish.more_blocks)
                best = self._among(few, wish, uncached, done, best, holders)
                best = self._walk(groups, pool, wish, uncached, holders, done, best)
            done = holders or done
        return best

    def prefill(self, wish: Wish, *, settled: bool) -> Candidate | None:
        """The best instance that computes the prompt for another."""
        group, pool = self._roster.prefills[settled], Pool(("prefill",), settled, waits=False)
        best: Candidate | None = None
        done: Holders = {}
        if not group.by_room or group.by_room[-1][0] <= 0:
            return None
        for depth, holders in self._levels(wish):
            uncached = wish.uncached(depth)
            if best is not None and self._key(group.by_load[0], uncached) >= best.key:
                break
            first = group.first_with(uncached)
            if holders is not None and len(holders) <= FEW:
                best = self._among(self._members(holders, pool), wish, uncached, done, best)
            elif len(group.by_room) - first <= FEW:
                few = [entry[2] for entry in group.by_room[first:]]
                best = self._among(few, wish, uncached, done, best, holders)
            else:
                best = self._walk([group], pool, wish, uncached, holders, done, best)
            done = holders or done
        return best

    def draw(self, roles: Sequence[str], wish: Wish, *, settled: bool) -> Candidate | None:
        """With two choices: the better of two that are drawn from all. None: it cannot have the request, or there are few."""
        if not self._draws:
            return None
        lists = self._roster.numbered(roles, settled=settled)
        total = sum(map(len, lists))
        if total <= 2:
            return None
        drawn = [_at(lists, place) for place in self._rng.sample(range(total), 2)]
        return self.among([min(drawn, key=_entry)], wish)

    def among(self, members: Iterable[Member], wish: Wish) -> Candidate | None:
        """The best of these, at whatever depth."""
        best: Candidate | None = None
        for member in members:
            if member.place is not None:
                uncached = wish.uncached(self._index.leading(member.number, wish.keys))
                key = self._key(member.place.entry, uncached)
                if (best is None or key < best.key) and wish.accept(member, uncached):
                    best = Candidate(key, member, uncached)
        return best

    # One depth

    def _levels(self, wish: Wish) -> list[Level]:
        if not wish.floor:
            return wish.levels
        if self.by_prefix:
            return [level for level in wish.levels if level[0] >= wish.floor]
        deepest = wish.levels[0][0]
        return [(deepest, self._index.holders(wish.keys[wish.floor - 1]))] if deepest >= wish.floor else []

    def _members(self, holders: Holders, pool: Pool) -> list[Member]:
        members, roles = self._roster.members, pool.roles
        found = [members[number] for number in holders if number in members]
        return [m for m in found if m.place is not None and m.place.settled == pool.settled and m.hello.role in roles]

    def _choose(self, pool: Pool, blocks: int) -> tuple[list[Member], list[Group]]:
        """Those with enough room where these are few, and groups to walk through where they are many."""
        roster, settled = self._roster, pool.settled
        few: list[Member] = []
        many = roster.groups(pool.roles, settled=settled, waits=True)
        by_room = roster.groups(pool.roles, settled=settled, waits=False)
        if pool.urgent:
            return few, many + by_room
        if not pool.waits:
            many, by_room = [], many + by_room
        for group in by_room:
            first = group.first_with(blocks)
            if len(group.by_room) - first <= FEW:
                few += [entry[2] for entry in group.by_room[first:]]
            else:
                many.append(group)
        return few, many

    def _among(
        self,
        members: Iterable[Member],
        wish: Wish,
        uncached: int,
        done: Holders,
        best: Candidate | None,
        holders: Holders | None = None,
    ) -> Candidate | None:
        """Of those that have to compute so much. `done`: seen at a greater depth. `holders`: only these."""
        by_prefix, accept = self.by_prefix, wish.accept
        for member in members:
            place = member.place
            if place is None:
                continue
            load, chosen, number, _ = place.entry
            key = (load + uncached if by_prefix else load, chosen, number)
            if (best is not None and key >= best.key) or number in done or (holders is not None and number not in holders):
                continue
            if not by_prefix and wish.keys:
                uncached = wish.uncached(self._index.leading(number, wish.keys))
            if accept(member, uncached):
                best = Candidate(key, member, uncached)
        return best

    def _walk(
        self,
        groups: list[Group],
        pool: Pool,
        wish: Wish,
        uncached: int,
        holders: Holders | None,
        done: Holders,
        best: Candidate | None,
    ) -> Candidate | None:
        """By load, until nothing better can come."""
        if not groups:
            return best
        patience = 0 if holders is None else len(holders)
        entries = groups[0].by_load if len(groups) == 1 else merge(*(group.by_load for group in groups))
        for entry in entries:
            if best is not None and self._key(entry, uncached) >= best.key:
                return best
            if holders is None or entry[2] in holders:
                best = self._among((entry[3],), wish, uncached, done, best)
            elif (patience := patience - 1) < 0:  # the holders are among the most loaded
                return self._among(self._members(holders, pool), wish, uncached, done, best)
        return best

    def _key(self, entry: Entry, uncached: int) -> Key:
        return (entry[0] + uncached if self.by_prefix else entry[0], entry[1], entry[2])

    def _is_full(self, pool: Pool, wish: Wish) -> bool:
        """No instance has room, even where most of the prompt is cached, and the request may wait at none."""
        if pool.urgent or (pool.waits and self._roster.groups(pool.roles, settled=pool.settled, waits=True)):
            return False
        blocks = -(-(wish.uncached(wish.levels[0][0]) + 1) // wish.size) + wish.more_blocks
        for waits in (True, False):
            for group in self._roster.groups(pool.roles, settled=pool.settled, waits=waits):
                if group.by_room[-1][0] >= blocks:
                    return False
        return True

    def _least_loaded(self, pool: Pool) -> Entry | None:
        """None: the pool is empty."""
        best: Entry | None = None
        for waits in (True, False):
            for group in self._roster.groups(pool.roles, settled=pool.settled, waits=waits):
                if best is None or group.by_load[0] < best:
                    best = group.by_load[0]
        return best


def _entry(member: Member) -> Entry:
    assert member.place is not None
    return member.place.entry


def _at(lists: list[list[tuple[int, Member]]], place: int) -> Member:
    for each in lists:
        if place < len(each):
            return each[place][1]
        place -= len(each)
    raise IndexError(place)
