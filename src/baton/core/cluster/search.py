"""Finds the best instance for a request: the same one as sorting all of them by the policy's key, after a look at a few.

    key     (load + uncached tokens, chosen longest ago, number) with policy "prefix"; without the uncached tokens otherwise

With "prefix", depths at which cached prefixes end are gone through from the deepest on. Holders of a prefix are nested, so an
instance that was not seen at a greater depth has exactly this one. At one depth the best instance is the least loaded one that
is acceptable, and what is more loaded is not looked at. Instances come from the smallest collection that has all that matter at
this depth: those that have the prefix, those with enough room, or all, by load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.config import RouterConfig
from baton.core.cluster.cluster_instance import ClusterInstance, Entry
from baton.core.cluster.prefix_index import Holders, PrefixIndex
from baton.core.cluster.roster import InstanceGroup, Roster
from baton.protocol.ids import BlockKey

if TYPE_CHECKING:
    from random import Random

FEW: Final = 64
"""So many instances are sorted by load; more of them are walked through in that order, which ends early."""

Key = tuple[int, int, int]
Accept = Callable[[ClusterInstance, int], bool]
"""May this instance have the request, of which so many tokens are not cached there?"""
Level = tuple[int, Holders | None]
"""A depth in blocks, and the instances that have at least so much. None: all."""


class Candidate(NamedTuple):
    key: Key
    instance: ClusterInstance
    uncached: int
    "Tokens that it would have to compute."


class Prompt:
    """What is to be computed, and where how much of it is cached. That is looked up once for all searches of one look."""

    __slots__ = ("_levels", "_search", "keys", "size", "tokens")

    def __init__(self, search: Search, keys: Sequence[BlockKey], tokens: int, size: int) -> None:
        self._search = search
        self._levels: list[Level] = []
        self.keys = keys
        "Of its blocks; none where prefixes do not matter."
        self.tokens = tokens
        self.size = size
        "Of a block."

    @property
    def levels(self) -> list[Level]:
        """Deepest first. Never empty."""
        if not self._levels:
            self._levels = self._search.levels(self.keys)
        return self._levels

    @property
    def deepest(self) -> int:
        return self.levels[0][0]

    def uncached(self, depth: int) -> int:
        return max(1, self.tokens - depth * self.size)


class Wish(NamedTuple):
    """What is looked for."""

    prompt: Prompt
    accept: Accept
    more_blocks: int | None
    "Beside those of the tokens. None: room is counted in tokens (prefill instances)."
    waits: bool = False
    "The request may wait where there is no room."
    urgent: bool = False
    "Also where only urgent requests may wait."
    floor: int = 0
    "Only instances that have so many of the first blocks."

    def room(self, uncached: int) -> int:
        """What an instance needs to begin at once."""
        return uncached if self.more_blocks is None else -(-(uncached + 1) // self.prompt.size) + self.more_blocks


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

    def decoder(self, roles: tuple[str, ...], wish: Wish, *, settled: bool) -> Candidate | None:
        """The best instance that begins the request, or at which it may wait."""
        return self._best(self._roster.groups(roles, settled), wish)

    def prefill(self, wish: Wish, *, settled: bool) -> Candidate | None:
        """The best instance that computes the prompt for another."""
        group = self._roster.prefills[settled]
        return self._best([group], wish) if group.by_load else None

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

    def among(self, instances: Iterable[ClusterInstance], wish: Wish) -> Candidate | None:
        """The best of these, at whatever depth."""
        best: Candidate | None = None
        for instance in instances:
            if instance.place is not None:
                uncached = wish.prompt.uncached(self._index.leading(instance.number, wish.prompt.keys))
                key = self._key(instance.place.entry, uncached)
                if (best is None or key < best.key) and wish.accept(instance, uncached):
                    best = Candidate(key, instance, uncached)
        return best

    # Depth by depth

    def _best(self, groups: list[InstanceGroup], wish: Wish) -> Candidate | None:
        if not groups or _is_full(groups, wish):
            return None
        best: Candidate | None = None
        done: Holders = {}
        least = min([group.by_load[0] for group in groups])
        for depth, holders in self._levels(wish):
            uncached = wish.prompt.uncached(depth)
            if best is not None and self._key(least, uncached) >= best.key:
                break
            if holders is not None and len(holders) <= FEW:
                best = self._first(_of(groups, holders), wish, uncached, done, best)
            else:
                few, many = _split(groups, wish, uncached)
                if few:
                    best = self._first(sorted(few), wish, uncached, done, best, holders)
                if many:
                    best = self._first(_by_load(many, holders), wish, uncached, done, best, holders)
            done = holders or done
        return best

    def _levels(self, wish: Wish) -> list[Level]:
        floor, levels = wish.floor, wish.prompt.levels
        if not floor:
            return levels
        if self.by_prefix:
            return [level for level in levels if level[0] >= floor]
        deepest = levels[0][0]
        return [(deepest, self._index.holders(wish.prompt.keys[floor - 1]))] if deepest >= floor else []

    def _first(
        self,
        entries: Iterable[Entry],
        wish: Wish,
        uncached: int,
        done: Holders,
        best: Candidate | None,
        holders: Holders | None = None,
    ) -> Candidate | None:
        """The first acceptable one of these, which come by load and have to compute so much, or `best` where that is better.
        `done`: seen at a greater depth. `holders`: only these."""
        by_prefix, prompt = self.by_prefix, wish.prompt
        for load, chosen, number, instance in entries:
            key = (load + uncached if by_prefix else load, chosen, number)
            if best is not None and key >= best.key:
                return best
            if number in done or (holders is not None and number not in holders):
                continue
            if not by_prefix and prompt.keys:
                uncached = prompt.uncached(self._index.leading(number, prompt.keys))
            if wish.accept(instance, uncached):
                return Candidate(key, instance, uncached)
        return best

    def _key(self, entry: Entry, uncached: int) -> Key:
        return (entry[0] + uncached if self.by_prefix else entry[0], entry[1], entry[2])


def _is_full(groups: list[InstanceGroup], wish: Wish) -> bool:
    """No instance has room, even where most of the prompt is cached, and the request may wait at none."""
    if wish.urgent or (wish.waits and any(group.waits for group in groups)):
        return False
    most = max([group.by_room[-1][0] for group in groups])
    return most < wish.room(1) or most < wish.room(wish.prompt.uncached(wish.prompt.deepest))


def _of(groups: list[InstanceGroup], holders: Holders) -> list[Entry]:
    """Those of the groups that are holders, by load."""
    return sorted([entry for group in groups for entry in map(group.entries.get, holders) if entry is not None])


def _split(groups: list[InstanceGroup], wish: Wish, uncached: int) -> tuple[list[Entry], list[InstanceGroup]]:
    """Those with enough room where these are few, and groups to walk through where they are many."""
    few: list[Entry] = []
    many: list[InstanceGroup] = []
    for group in groups:
        if wish.urgent or (wish.waits and group.waits):
            many.append(group)
            continue
        first = group.first_with(wish.room(uncached))
        if len(group.by_room) - first <= FEW:
            few += [group.entries[number] for _, number in group.by_room[first:]]
        else:
            many.append(group)
    return few, many


def _by_load(groups: list[InstanceGroup], holders: Holders | None) -> Iterable[Entry]:
    """All of the groups. Where holders are looked for, these alone from some point on: they may be the most loaded ones."""
    entries = groups[0].by_load if len(groups) == 1 else merge(*[group.by_load for group in groups])
    return entries if holders is None else _then_holders(entries, groups, holders)


def _then_holders(entries: Iterable[Entry], groups: list[InstanceGroup], holders: Holders) -> Iterator[Entry]:
    yield from islice(entries, len(holders))
    yield from _of(groups, holders)


def _entry(instance: ClusterInstance) -> Entry:
    assert instance.place is not None
    return instance.place.entry


def _at(lists: list[list[tuple[int, ClusterInstance]]], place: int) -> ClusterInstance:
    for each in lists:
        if place < len(each):
            return each[place][1]
        place -= len(each)
    raise IndexError(place)
