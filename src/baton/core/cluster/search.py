"""Finds the best instance for a request: the same one as sorting all of them by the policy's key, after visiting a few.

    key     (load + uncached tokens, least recently chosen, number) with policy "prefix"; without the uncached tokens otherwise

With "prefix", the depths at which cached prefixes end are visited from the deepest on, each with the instances whose deepest
mark it is (prefix_index.py). At one depth the best instance is the least loaded
acceptable one, and more loaded ones are not visited. Instances come from the smallest collection that has all that matter at
this depth: those that have the prefix, those with enough room, or all, by load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Final, NamedTuple

from baton.config import RouterConfig
from baton.core.cluster.cluster_instance import ClusterInstance, Entry
from baton.core.cluster.prefix_index import ALL, PrefixIndex
from baton.core.cluster.roster import InstanceGroup, Roster
from baton.core.kv.marks import Mark

FEW: Final = 32
"""Maximum of instances that are sorted by load; more are walked through in that order, which ends early."""

Key = tuple[int, int, int]
Accept = Callable[[ClusterInstance, int], bool]
"""Whether an instance may get the request, with this number of uncached tokens there."""
Level = tuple[int, int]
"""A depth in blocks, and the set of instances that have it (prefix_index.py)."""


class Candidate(NamedTuple):
    key: Key
    instance: ClusterInstance
    uncached: int
    "Tokens that the instance would have to compute."


class Prompt:
    """The prompt of one request, and its cached depth per instance. Looked up once for all searches of one choice."""

    __slots__ = ("_levels", "_numbers", "_search", "marks", "size", "tokens")

    def __init__(self, search: Search, marks: Sequence[Mark], tokens: int, size: int) -> None:
        self._search = search
        self._levels: list[Level] = []
        self._numbers: dict[int, list[int]] = {}
        self.marks = marks
        "Marked blocks of the prompt; empty if prefixes do not matter."
        self.tokens = tokens
        self.size = size
        "Tokens per block."

    @property
    def levels(self) -> list[Level]:
        """Depths and their instances, deepest first. Never empty."""
        if not self._levels:
            self._levels = self._search.levels(self.marks)
        return self._levels

    @property
    def deepest(self) -> int:
        return self.levels[0][0]

    def numbers(self, holders: int) -> list[int]:
        """Numbers of the instances in a set. The searches of one choice ask for the same sets."""
        found = self._numbers.get(holders)
        if found is None:
            found = self._numbers[holders] = self._search.numbers(holders)
        return found

    def uncached(self, depth: int) -> int:
        return max(1, self.tokens - depth * self.size)


class SearchConditions(NamedTuple):
    """Conditions of a search."""

    prompt: Prompt
    accept: Accept
    more_blocks: int | None
    "Blocks besides those of the tokens. None: room is counted in tokens (prefill instances)."
    waits: bool = False
    "Whether the request may wait where there is no room."
    urgent: bool = False
    "Whether instances count where only urgent requests may wait."
    floor: int = 0
    "Least number of leading blocks that an instance must have."

    def room(self, uncached: int) -> int:
        """Room that an instance needs to begin at once."""
        return uncached if self.more_blocks is None else -(-(uncached + 1) // self.prompt.size) + self.more_blocks


class Search:
    __slots__ = ("_index", "_roster", "by_prefix")

    def __init__(self, config: RouterConfig, roster: Roster, index: PrefixIndex) -> None:
        self._roster = roster
        self._index = index
        self.by_prefix = config.policy == "prefix"

    def levels(self, marks: Sequence[Mark]) -> list[Level]:
        """Depths to search. With other policies depth does not matter for the order: one level, at which no instance is
        deeper."""
        return self._index.levels(marks) if self.by_prefix else [(self._index.deepest(marks), ALL)]

    def numbers(self, holders: int) -> list[int]:
        return self._index.numbers(holders)

    def decoder(self, roles: tuple[str, ...], wish: SearchConditions, *, settled: bool) -> Candidate | None:
        """The best instance that begins the request, or at which it may wait."""
        return self._best(self._roster.groups(roles, settled), wish)

    def prefill(self, wish: SearchConditions, *, settled: bool) -> Candidate | None:
        """The best instance that computes the prompt for another."""
        group = self._roster.prefills[settled]
        return self._best([group], wish) if group.by_load else None

    def among(self, instances: Iterable[ClusterInstance], wish: SearchConditions) -> Candidate | None:
        """The best of these instances, at any depth."""
        best: Candidate | None = None
        for instance in instances:
            if instance.place is not None:
                uncached = wish.prompt.uncached(self._index.depth(instance.number, wish.prompt.marks))
                key = self._key(instance.place.entry, uncached)
                if (best is None or key < best.key) and wish.accept(instance, uncached):
                    best = Candidate(key, instance, uncached)
        return best

    # Depth by depth

    def _best(self, groups: list[InstanceGroup], wish: SearchConditions) -> Candidate | None:
        if not groups or _is_full(groups, wish):
            return None
        best: Candidate | None = None
        least = min([group.by_load[0] for group in groups])
        for depth, holders in self._levels(wish):
            uncached = wish.prompt.uncached(depth)
            if best is not None and self._key(least, uncached) >= best.key:
                break
            if holders >= 0 and holders.bit_count() <= FEW:
                best = self._first(self._of(groups, wish, holders), wish, uncached, holders, best)
                continue
            few, many = _split(groups, wish, uncached)
            if few:
                best = self._first(sorted(few), wish, uncached, holders, best)
            if many:
                best = self._first(self._by_load(many, wish, holders), wish, uncached, holders, best)
        return best

    def _levels(self, wish: SearchConditions) -> list[Level]:
        floor, levels = wish.floor, wish.prompt.levels
        if not floor:
            return levels
        if self.by_prefix:
            return [level for level in levels if level[0] >= floor]
        deepest, deep = levels[0][0], [key for place, key in wish.prompt.marks if place >= floor]
        return [(deepest, self._index.holders(deep))] if deepest >= floor else []

    def _first(
        self, entries: Iterable[Entry], wish: SearchConditions, uncached: int, holders: int, best: Candidate | None
    ) -> Candidate | None:
        """The first acceptable entry of `holders`, or `best` if that is better. Entries come by load, and all holders have
        `uncached` tokens to compute."""
        by_prefix, prompt = self.by_prefix, wish.prompt
        for load, chosen, number, instance in entries:
            key = (load + uncached if by_prefix else load, chosen, number)
            if best is not None and key >= best.key:
                return best
            if not holders & instance.bit:
                continue
            if not by_prefix and prompt.marks:
                uncached = prompt.uncached(self._index.depth(number, prompt.marks))
            if wish.accept(instance, uncached):
                return Candidate(key, instance, uncached)
        return best

    def _key(self, entry: Entry, uncached: int) -> Key:
        return (entry[0] + uncached if self.by_prefix else entry[0], entry[1], entry[2])

    def _of(self, groups: list[InstanceGroup], wish: SearchConditions, holders: int) -> list[Entry]:
        """Entries of the groups, by load, whose instances are holders."""
        numbers = wish.prompt.numbers(holders)
        return sorted([entry for group in groups for entry in map(group.entries.get, numbers) if entry is not None])

    def _by_load(self, groups: list[InstanceGroup], wish: SearchConditions, holders: int) -> Iterator[Entry]:
        """All entries of the groups by load. Holders may be the most loaded ones, so the walk ends after as many entries as
        there are holders."""
        entries = groups[0].by_load if len(groups) == 1 else merge(*[group.by_load for group in groups])
        if holders < 0:
            yield from entries
        else:
            yield from islice(entries, holders.bit_count())
            yield from self._of(groups, wish, holders)


def _is_full(groups: list[InstanceGroup], wish: SearchConditions) -> bool:
    """Whether no instance has room, even where most of the prompt is cached, and the request may wait at none."""
    if wish.urgent or (wish.waits and any(group.waits for group in groups)):
        return False
    most = max([group.by_room[-1][0] for group in groups])
    return most < wish.room(1) or most < wish.room(wish.prompt.uncached(wish.prompt.deepest))


def _split(groups: list[InstanceGroup], wish: SearchConditions, uncached: int) -> tuple[list[Entry], list[InstanceGroup]]:
    """Split the groups: entries with enough room where these are few, and groups to walk through where they are many."""
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
