"""Instances that may get new requests now, sorted so that a request finds its instance without visiting all of them.

    by load     the order of the policy, where nothing is cached
    by room     how many blocks a request may need to begin there at once
    by size     how many instances could ever hold a request of a given length

An instance is sorted in again when an event changes it (`touch`, `update`); time changes three things (silence, a hold, an
inhibition), and `refresh` checks those. Instances are grouped by what excludes whole groups: role, whether they were lost again
and again (`settled`), and whether a request may wait there without room.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final

from baton.config import RouterConfig
from baton.core.cluster.cluster_instance import ClusterInstance, Entry, Order, Place
from baton.core.cluster.placed_blocks import PlacedBlocks
from baton.errors import InvariantBroken
from baton.protocol.ids import Instant

RoomEntry = tuple[int, int]
"""Entry of an instance: free blocks or tokens, number."""
STEPS: Final = 2
"""Number of its steps for which a prefill instance is sent prompts, so that it never waits for the router."""
ANY_PROMPT: Final = 2**62


class InstanceGroup:
    """Instances of one role that differ only in load and room."""

    __slots__ = ("by_load", "by_room", "entries", "waits")

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits
        self.by_load: list[Entry] = []
        self.by_room: list[RoomEntry] = []
        self.entries: dict[int, Entry] = {}
        "Entries of `by_load`, by number."

    def add(self, entry: Entry, room: int) -> None:
        insort(self.by_load, entry)
        insort(self.by_room, (room, entry[2]))
        self.entries[entry[2]] = entry

    def remove(self, entry: Entry, room: int) -> None:
        del self.by_load[bisect_left(self.by_load, entry)]
        del self.by_room[bisect_left(self.by_room, (room, entry[2]))]
        del self.entries[entry[2]]

    def replace(self, before: Entry, room_before: int, after: Entry, room: int) -> None:
        """Update one instance. Unchanged values cost nothing."""
        if before != after:
            del self.by_load[bisect_left(self.by_load, before)]
            insort(self.by_load, after)
            self.entries[after[2]] = after
        if room_before != room:
            del self.by_room[bisect_left(self.by_room, (room_before, after[2]))]
            insort(self.by_room, (room, after[2]))

    def first_with(self, room: int) -> int:
        """Index in `by_room` of the first instance with this much room."""
        return bisect_left(self.by_room, (room,))


class Sizes:
    """Capacities of the instances of one role, to count them."""

    __slots__ = ("capacities",)

    def __init__(self) -> None:
        self.capacities: list[int] = []

    def add(self, instance: ClusterInstance) -> None:
        insort(self.capacities, instance.capacity)

    def remove(self, instance: ClusterInstance) -> None:
        del self.capacities[bisect_left(self.capacities, instance.capacity)]

    def able(self, tokens: int) -> int:
        return len(self.capacities) - bisect_left(self.capacities, tokens)


PEER: Final = "peer"
"""Name in place of a role: prefill instances that others can read from."""


class Roster:
    __slots__ = (
        "_by_time",
        "_classes",
        "_config",
        "_found",
        "_groups",
        "_least_urgent",
        "_now",
        "_sizes",
        "_suspect_at",
        "_touched",
        "_urgent",
        "fastest",
        "instances",
        "placed",
        "prefills",
        "usable_changed",
        "usable_version",
    )

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.instances: dict[int, ClusterInstance] = {}
        "All instances, by number."
        self._groups: dict[tuple[str, bool, bool], InstanceGroup] = {}
        "Groups by role, settled, waits."
        self._found: dict[tuple[tuple[str, ...], bool], list[InstanceGroup]] = {}
        "Cached results of `groups`, valid while the same groups have instances."
        self.prefills: dict[bool, InstanceGroup] = {True: InstanceGroup(waits=False), False: InstanceGroup(waits=False)}
        "Instances that compute prompts for others, by settled; room is in tokens."
        self._sizes: dict[tuple[str, bool], Sizes] = {}
        self._urgent: list[Order] = []
        "Queue orders before which requests may wait, of all instances with such a limit, sorted."
        self._least_urgent: list[int] = []
        "Least urgent priorities of usable instances' running requests, sorted."
        self._touched: dict[int, ClusterInstance] = {}
        self._by_time: dict[int, ClusterInstance] = {}
        "Instances that change at a point in time: held, or inhibited."
        self._suspect_at = float("inf")
        "Lower bound of the time when the next usable instance becomes suspect by silence."
        self._now = Instant(0.0)
        self.fastest = float("inf")
        "Lower bound of the seconds per prompt token of all decode instances."
        self.placed = PlacedBlocks()
        "Blocks of all placed requests, by priority."
        self._classes: list[int] = []
        "Capacities of usable instances, ascending, each once."
        self.usable_version = 0
        "Counter, raised when an instance becomes usable or unusable."
        self.usable_changed = True
        "Whether an instance has become usable or unusable. Reset by the placement pass."

    # Changes

    def join(self, instance: ClusterInstance) -> None:
        self.instances[instance.number] = instance
        self.touch(instance)

    def leave(self, instance: ClusterInstance) -> None:
        del self.instances[instance.number]
        self._touched.pop(instance.number, None)
        self._by_time.pop(instance.number, None)
        self._move(instance, None)
        self._learn_fastest()

    def touch(self, instance: ClusterInstance) -> None:
        """Record that the instance has changed: it is sorted in anew before the next search."""
        if instance.number in self.instances:
            self._touched[instance.number] = instance

    def update(self, instance: ClusterInstance, now: Instant) -> bool:
        """Sort the instance in at once. True: it is now more likely to get a request."""
        self._now = max(self._now, now)
        before = instance.place
        self._touched.pop(instance.number, None)
        self._sort_in(instance)
        after = instance.place
        if before is None or after is None:
            return before is not after
        return (
            after.blocks > before.blocks
            or after.waits > before.waits
            or after.prompt_tokens > before.prompt_tokens
            or after.settled > before.settled
            or (after.least_urgent is not None and (before.least_urgent is None or after.least_urgent > before.least_urgent))
        )

    def refresh(self, now: Instant) -> None:
        """Sort in all changed instances."""
        self._now = max(self._now, now)
        if self._by_time:
            for instance in [m for m in self._by_time.values() if max(m.held_until, m.inhibited_until) <= now]:
                del self._by_time[instance.number]
                self.touch(instance)
            for instance in [m for m in self._by_time.values() if m.held_until <= now and m.place is None]:
                self.touch(instance)
        if self._suspect_at <= now:
            self._find_silent()
        while self._touched:
            self._sort_in(self._touched.popitem()[1])

    def _find_silent(self) -> None:
        """Visit all instances, at most once in the time that an instance may be silent."""
        seconds, first = self._config.suspect_seconds, float("inf")
        for instance in self.instances.values():
            if instance.place is not None:
                if instance.is_suspect(self._now, seconds):
                    self._sort_in(instance)
                else:
                    first = min(first, instance.received_at)
        self._suspect_at = first + seconds

    def _sort_in(self, instance: ClusterInstance) -> None:
        config, now, held, inhibited = self._config, self._now, instance.held_until, instance.inhibited_until
        seconds = instance.beat.token_seconds
        if 0 < seconds < self.fastest and instance.hello.role == "decode":
            self.fastest = seconds
        if held > now or inhibited > now:
            self._by_time[instance.number] = instance
        if held > now or instance.mode != "serving" or instance.is_suspect(now, config.suspect_seconds):
            self._move(instance, None)
            return
        suspect_at = instance.received_at + config.suspect_seconds
        if suspect_at < self._suspect_at:
            self._suspect_at = suspect_at
        waits, closes_at = self._may_wait(instance)
        entry = (instance.load, instance.chosen, instance.number, instance)
        least = max([priority for priority, _ in instance.beat.held], default=None)
        prompt_room = self.prompt_room(instance)
        self._move(instance, Place(inhibited <= now, waits, entry, instance.blocks_free, closes_at, prompt_room, least))

    def _may_wait(self, instance: ClusterInstance) -> tuple[bool, Order | None]:
        """Whether, and which, requests may wait there without room. Less urgent requests that wait there are no obstacle to one
        more."""
        limit, waiting = self._config.waiting_prompts_max, instance.over_capacity
        if len(waiting) >= self._config.overdrawn_max or not limit:
            return False, None
        if len(waiting) < limit:
            return True, None
        return False, sorted(waiting.values())[limit - 1]

    def prompt_room(self, instance: ClusterInstance) -> int:
        """Size of the largest prompt that this instance may be sent to compute for others. -1: none."""
        if instance.hello.role != "prefill" or not instance.hello.peers:
            return -1
        if instance.prompts <= self._config.waiting_prompts_max:  # one prompt is computed, and this many wait
            return ANY_PROMPT
        return max(0, STEPS * instance.hello.step_tokens - instance.prompt_tokens)

    def _move(self, instance: ClusterInstance, after: Place | None) -> None:
        before, role = instance.place, instance.hello.role
        if before == after:
            return
        instance.place = after
        if before is not None and after is not None and before.settled == after.settled and before.waits == after.waits:
            group = self._groups[role, after.settled, after.waits]
            group.replace(before.entry, before.blocks, after.entry, after.blocks)
            if after.prompt_tokens >= 0:
                self.prefills[after.settled].replace(before.entry, before.prompt_tokens, after.entry, after.prompt_tokens)
        else:
            if before is not None:
                self._take_out(role, before)
            if after is not None:
                self._group(role, after).add(after.entry, after.blocks)
                if after.prompt_tokens >= 0:
                    self.prefills[after.settled].add(after.entry, after.prompt_tokens)
            if (None if before is None else before.settled) != (None if after is None else after.settled):
                self._count(instance, before, after)
        if before is not None and before.closes_at is not None:
            del self._urgent[bisect_left(self._urgent, before.closes_at)]
        if after is not None and after.closes_at is not None:
            insort(self._urgent, after.closes_at)
        if before is not None and before.least_urgent is not None:
            del self._least_urgent[bisect_left(self._least_urgent, before.least_urgent)]
        if after is not None and after.least_urgent is not None:
            insort(self._least_urgent, after.least_urgent)

    def _take_out(self, role: str, place: Place) -> None:
        group = self._groups[role, place.settled, place.waits]
        group.remove(place.entry, place.blocks)
        if not group.by_load:
            self._found.clear()
        if place.prompt_tokens >= 0:
            self.prefills[place.settled].remove(place.entry, place.prompt_tokens)

    def _group(self, role: str, place: Place) -> InstanceGroup:
        """The group to add an instance to."""
        key = (role, place.settled, place.waits)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = InstanceGroup(waits=place.waits)
        if not group.by_load:
            self._found.clear()
        return group

    def _count(self, instance: ClusterInstance, before: Place | None, after: Place | None) -> None:
        role = instance.hello.role
        self.usable_changed = True
        self.usable_version += 1
        self._classes = []
        for key in (role, PEER) if role == "prefill" and instance.hello.peers else (role,):
            if before is not None:
                self._sizes[key, before.settled].remove(instance)
            if after is not None:
                self._sizes.setdefault((key, after.settled), Sizes()).add(instance)

    def _learn_fastest(self) -> None:
        seconds = [
            m.beat.token_seconds for m in self.instances.values() if m.hello.role == "decode" and m.beat.token_seconds > 0
        ]
        self.fastest = min(seconds, default=float("inf"))

    # Queries, after `refresh`

    @property
    def any_usable(self) -> bool:
        return any(sizes.capacities for sizes in self._sizes.values())

    def able(self, roles: Iterable[str], tokens: int, *, settled: bool) -> int:
        """Number of usable instances of these roles that could hold `tokens`."""
        found = [self._sizes.get((role, settled)) for role in roles]
        return sum(sizes.able(tokens) for sizes in found if sizes is not None)

    def smallest(self, role: str) -> int | None:
        """The smallest capacity of a usable instance of that role."""
        found = [self._sizes[role, settled].capacities for settled in (True, False) if (role, settled) in self._sizes]
        return min((capacities[0] for capacities in found if capacities), default=None)

    def sizes(self) -> list[int]:
        """All capacities of usable instances, ascending."""
        if not self._classes:
            self._classes = sorted({size for sizes in self._sizes.values() for size in sizes.capacities})
        return self._classes

    def size_class(self, tokens: int) -> int:
        """Class of a request by size: all of one class fit the same instances."""
        return bisect_left(self.sizes(), tokens)

    def groups(self, roles: tuple[str, ...], settled: bool) -> list[InstanceGroup]:
        """The groups of these roles that have instances."""
        found = self._found.get((roles, settled))
        if found is None:
            every = [self._groups.get((role, settled, waits)) for waits in (True, False) for role in roles]
            found = self._found[roles, settled] = [group for group in every if group is not None and group.by_load]
        return found

    def may_be_urgent(self, order: Order) -> bool:
        """Whether perhaps a request with this place in the queue may wait where only less urgent ones wait."""
        return bool(self._urgent) and self._urgent[-1] > order

    def may_preempt(self, order: Order) -> bool:
        """True: perhaps an instance holds less urgent requests than one with this place in the queue."""
        return (bool(self._least_urgent) and self._least_urgent[-1] > order[0]) or self.placed.less_urgent(order[0]) > 0

    @property
    def prefill_has_room(self) -> bool:
        return any(group.by_room and group.by_room[-1][0] > 0 for group in self.prefills.values())

    def has_open(self, role: str) -> bool:
        """Whether perhaps some instance of that role can take one more request, whole."""
        for (each, _, waits), group in self._groups.items():
            if each == role and group.by_room and (waits or group.by_room[-1][0] > 0):
                return True
        return False

    def next_change(self) -> Instant | None:
        """Time when a held instance may be tried again, an inhibited one is settled, or one becomes suspect by silence."""
        times = [at for m in self._by_time.values() for at in (m.held_until, m.inhibited_until) if at > self._now]
        if self._now < self._suspect_at < float("inf"):
            times.append(Instant(self._suspect_at))
        return min(times, default=None)

    def check(self) -> None:
        """Verify that every instance is sorted in correctly. Touched ones are sorted in before the next search."""
        for instance in self.instances.values():
            if instance.number in self._touched or instance.number in self._by_time or instance.place is None:
                continue
            place = instance.place
            self._sort_in(instance)
            if instance.place != place and not instance.is_suspect(self._now, self._config.suspect_seconds):
                raise InvariantBroken(f"{instance!r} is sorted in as {place[:5]}, not as {instance.place!r}", invariant=49)
        sorted_in = sum(len(group.by_load) for group in self._groups.values())
        for group in (*self._groups.values(), *self.prefills.values()):
            if sorted(group.entries.values()) != group.by_load:
                raise InvariantBroken("instances by number are not those by load", invariant=49)
        if sorted_in != sum(instance.place is not None for instance in self.instances.values()):
            raise InvariantBroken(f"{sorted_in} instances are sorted in, of {len(self.instances)}", invariant=49)
