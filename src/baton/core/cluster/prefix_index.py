"""Prefixes cached by each instance: an index from short keys of marked blocks (core/kv/marks.py) to instances.

    publish(instance, ...)   the instance reports what it has and what it has evicted (its digest)
    guess(instance, marks)   the router has sent it this chain: the instance has it soon, or had it
    forget(instance)         the instance is gone

A guess about an instance that publishes counts until the instance confirms it, and 30 to 60 s at most. Instances of earlier
builds publish nothing: of these the last guesses are kept, as many as their pool has blocks.

A set of instances is an int with one bit per instance. No question assumes that an instance with a key has those before it in
the chain: keys arrive in parts, the host tier has holes, and an instance may report anything. A wrong key costs time, never an
answer.

No change drops more than SWEEP_KEYS keys besides those that it names, and as many as it adds: requests of all clients wait for
it. Later changes drop the others: keys that a snapshot made void (they count as held until then), those of an instance that is
gone (its bit is ignored), and those above a share that became smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final

from baton.core.kv.marks import Mark, blocks_before
from baton.errors import InvariantBroken
from baton.protocol.ids import Instant

GUESS_SECONDS: Final = 30.0
"""Seconds after which an unconfirmed guess is dropped; it may live twice as long."""
CONFIRMED: Final = 0
ALL: Final = -1
"""The set of all instances."""
SWEEP_KEYS: Final = 1024
"""Keys that one change may drop, besides those that it names and as many as it adds."""
MANY: Final = 12
"""Number of instances from which a set is read from its binary digits, which is then cheaper than bit by bit."""
SPARE: Final = 256
"""Divisor of a full share: this part of it is dropped at once, because finding the oldest key costs a walk over deleted
ones."""


class KnownKeys:
    """Keys of one instance."""

    __slots__ = ("bit", "blocks", "blocks_max", "earlier", "gone", "guesses", "keys", "publishes", "turned_at", "void")

    def __init__(self, bit: int, blocks_max: int, *, publishes: bool) -> None:
        self.bit = bit
        self.blocks_max = blocks_max
        "Blocks of its pool."
        self.publishes = publishes
        self.gone = False
        self.keys: dict[int, int] = {}
        "CONFIRMED, or the number of blocks that a guess stands for, by key. The least recently used first."
        self.blocks = 0
        "Sum of blocks that all guesses stand for."
        self.guesses: dict[int, None] = {}
        "Unconfirmed keys guessed since `turned_at`, of an instance that publishes. The oldest first."
        self.earlier: dict[int, None] = {}
        "Unconfirmed keys guessed before `turned_at`."
        self.turned_at = Instant(0.0)
        self.void: dict[int, int] = {}
        "Keys that the instance has dropped. They count as held until they are removed here."


class PrefixIndex:
    __slots__ = ("_bits_free", "_debtors", "_gone", "_holders", "_known", "_numbers", "_total", "_unchecked", "cut", "keys_max")

    def __init__(self, keys_max: int) -> None:
        self.keys_max = keys_max
        "Bound on the entries of all instances together."
        self._holders: dict[int, int] = {}
        "Instances by key. Most keys have one holder, and share its bit as object."
        self._unchecked: Iterator[int] = iter(self._holders)
        "Keys that the next parts of the check begin with."
        self._known: dict[int, KnownKeys] = {}
        self._numbers: dict[int, int] = {}
        "Instances by the position of their bit."
        self._bits_free: list[int] = []
        self._debtors: dict[int, KnownKeys] = {}
        "Keys that are still to be dropped, by the bit of the instance that has or had them."
        self._gone = 0
        "Instances that are gone, and have keys to be dropped."
        self._total = 0
        self.cut = 0
        "Confirmed keys that were dropped, because their instance has more than its share."

    def __len__(self) -> int:
        return self._total

    @property
    def keys(self) -> int:
        """Number of different keys."""
        return len(self._holders)

    def count(self, number: int) -> int:
        return len(self._known[number].keys) if number in self._known else 0

    def confirmed(self, number: int) -> list[int]:
        """Keys that the instance has published."""
        return [key for key, blocks in self._known[number].keys.items() if blocks == CONFIRMED]

    # Changes

    def join(self, number: int, blocks_max: int, *, publishes: bool) -> int:
        """Add an instance with a pool of `blocks_max` blocks and return its bit. The shares of all others become smaller."""
        position = self._bits_free.pop() if self._bits_free else len(self._numbers) + self._gone.bit_count()
        self._numbers[position] = number
        known = self._known[number] = KnownKeys(1 << position, blocks_max, publishes=publishes)
        share = self.share
        self._debtors.update((other.bit, other) for other in self._known.values() if len(other.keys) > share)
        self._sweep(SWEEP_KEYS)
        return known.bit

    def guess(self, number: int, marks: Sequence[Mark]) -> None:
        """Record the guess that the instance has this chain, or computes it. The first block becomes the most recent one: a
        chain is useful only from its beginning on, so its end is forgotten first."""
        known = self._known[number]
        for place, key in reversed(marks):
            blocks = known.keys.pop(key, None)
            if blocks is None:
                blocks = blocks_before(place)
                known.blocks += blocks
                self._hold(known, key)
            known.keys[key] = blocks
            if blocks != CONFIRMED and known.publishes:
                _forget_guess(known, key)
                known.guesses[key] = None
        self._settle(known, len(marks))

    def publish(self, number: int, *, whole: bool, added: Sequence[int], removed: Sequence[int]) -> int:
        """Record the instance's report of its cache. Returns how many of its keys were dropped because they exceed its
        share."""
        known = self._known[number]
        if whole:
            self._make_void(known)
        for key in removed:
            if key in known.keys:
                self._drop(known, key)
            elif key in known.void:
                self._release(known, known.void, key)
        for key in added:
            blocks = known.keys.pop(key, None)
            if blocks is None:
                self._hold(known, key)
            elif blocks != CONFIRMED:
                known.blocks -= blocks
                _forget_guess(known, key)
            known.keys[key] = CONFIRMED
        return self._settle(known, len(added))

    def expire(self, number: int, now: Instant) -> None:
        """Drop guesses that the instance has not confirmed in time."""
        self._sweep(SWEEP_KEYS)
        known = self._known[number]
        if not known.publishes or now - known.turned_at < GUESS_SECONDS:
            return
        for key in list(known.earlier):
            self._drop(known, key)
        known.earlier, known.guesses, known.turned_at = known.guesses, {}, now

    def forget(self, number: int) -> None:
        """Forget an instance that is gone."""
        known = self._known.pop(number)
        position = known.bit.bit_length() - 1
        del self._numbers[position]
        known.gone = True
        known.guesses, known.earlier = {}, {}
        known.void, known.keys = _merged(known.void, known.keys), {}
        self._gone |= known.bit
        self._debtors[known.bit] = known
        self._sweep(SWEEP_KEYS)

    @property
    def share(self) -> int:
        """Maximum of keys of one instance."""
        return max(1, self.keys_max // max(1, len(self._known)))

    def _make_void(self, known: KnownKeys) -> None:
        """Drop all confirmed keys. Guesses remain."""
        held = known.keys
        known.keys = {key: held.pop(key) for key in chain(known.earlier, known.guesses)}
        known.void = _merged(known.void, held)
        if known.void:
            self._debtors[known.bit] = known

    def _settle(self, known: KnownKeys, added: int) -> int:
        """Drop keys after a change that has added some. Returns how many confirmed keys of the instance were more than its
        share."""
        before = self.cut
        keys_max = SWEEP_KEYS + added
        keys_max -= self._trim(known, keys_max)
        if self._is_over(known):
            self._debtors[known.bit] = known
        cut = self.cut - before
        self._sweep(keys_max)
        return cut

    def _sweep(self, keys_max: int) -> None:
        """Drop at most `keys_max` keys of earlier changes."""
        while self._debtors and keys_max > 0:
            known = next(iter(self._debtors.values()))
            void = list(islice(reversed(known.void), keys_max))
            for key in void:
                self._release(known, known.void, key)
            keys_max -= len(void)
            keys_max -= self._trim(known, keys_max)
            if not known.void and not self._is_over(known):
                self._forgive(known)

    def _forgive(self, known: KnownKeys) -> None:
        """Record that the instance has no more keys to be dropped."""
        del self._debtors[known.bit]
        if known.gone:
            self._gone &= ~known.bit
            self._bits_free.append(known.bit.bit_length() - 1)

    def _is_over(self, known: KnownKeys) -> bool:
        return len(known.keys) > self.share or (known.blocks > known.blocks_max and not known.publishes)

    def _trim(self, known: KnownKeys, keys_max: int) -> int:
        """Drop the oldest keys that are too many, at most `keys_max`, and return their number. One iteration finds them all."""
        if not self._is_over(known):
            return 0
        share = self.share
        keys = len(known.keys) - share + share // SPARE if len(known.keys) > share else 0
        blocks = 0 if known.publishes else known.blocks - known.blocks_max
        oldest: list[int] = []
        for key, stands_for in islice(known.keys.items(), keys_max):
            if len(oldest) >= keys and blocks <= 0:
                break
            oldest.append(key)
            blocks -= stands_for
            self.cut += stands_for == CONFIRMED
        for key in oldest:
            self._drop(known, key)
        return len(oldest)

    def _hold(self, known: KnownKeys, key: int) -> None:
        if key in known.void:
            del known.void[key]
            return
        held = self._holders.get(key)
        self._holders[key] = known.bit if held is None else held | known.bit
        self._total += 1

    def _drop(self, known: KnownKeys, key: int) -> None:
        blocks = known.keys[key]
        if blocks != CONFIRMED:
            known.blocks -= blocks
            _forget_guess(known, key)
        self._release(known, known.keys, key)

    def _release(self, known: KnownKeys, keys: dict[int, int], key: int) -> None:
        del keys[key]
        self._total -= 1
        left = self._holders[key] & ~known.bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    # Queries

    def depth(self, number: int, marks: Sequence[Mark]) -> int:
        """Depth in blocks of the deepest mark of the chain that this instance has."""
        bit, holders = self._known[number].bit, self._holders
        return next((place for place, key in reversed(marks) if holders.get(key, 0) & bit), 0)

    def deepest(self, marks: Sequence[Mark]) -> int:
        """Depth in blocks of the deepest mark of the chain that any instance has."""
        there, holders = ~self._gone, self._holders
        return next((place for place, key in reversed(marks) if holders.get(key, 0) & there), 0)

    def has(self, number: int, key: int) -> bool:
        return self._holders.get(key, 0) & self._known[number].bit != 0

    def holders(self, keys: Iterable[int]) -> int:
        """Instances that have any of these keys."""
        found = 0
        for key in keys:
            found |= self._holders.get(key, 0)
        return found & ~self._gone

    def numbers(self, instances: int) -> list[int]:
        """Numbers of the instances in a finite set."""
        found = []
        if instances.bit_count() > MANY:
            at, numbers = -1, self._numbers
            for zeros in bin(instances)[:1:-1].split("1")[:-1]:
                at += len(zeros) + 1
                found.append(numbers[at])
            return found
        while instances:
            lowest = instances & -instances
            found.append(self._numbers[lowest.bit_length() - 1])
            instances ^= lowest
        return found

    def levels(self, marks: Sequence[Mark]) -> list[tuple[int, int]]:
        """Depths of the chain, deepest first, each with the instances whose deepest mark it is. The last one is 0, with all
        others."""
        levels: list[tuple[int, int]] = []
        seen, holders = self._gone, self._holders
        for place, key in reversed(marks):
            held = holders.get(key)
            if held is not None and (fresh := held & ~seen):
                levels.append((place, fresh))
                seen |= fresh
        levels.append((0, ~seen))
        return levels

    # Proof

    def check(self) -> None:
        self._check_counts()
        held = sum(instances.bit_count() for instances in self._holders.values())
        if self._total != held:
            raise InvariantBroken(f"the prefix index counts {self._total} entries and has {held}", invariant=49)
        for known in self._known.values():
            if known.blocks != sum(known.keys.values()):
                raise InvariantBroken("the blocks of guesses are counted wrong", invariant=49)
            guesses = sum(blocks != CONFIRMED for blocks in known.keys.values()) if known.publishes else 0
            if len(known.guesses) + len(known.earlier) != guesses:
                text = f"{len(known.guesses) + len(known.earlier)} guesses are remembered of {guesses}"
                raise InvariantBroken(text, invariant=49)

    def check_part(self, keys: int) -> None:
        """Check the next keys, and everything that grows with instances."""
        self._check_counts()
        by_position = {known.bit.bit_length() - 1: known for known in (*self._known.values(), *self._debtors.values())}
        for key in self._next_part(keys):
            left = self._holders[key]
            if not left:
                raise InvariantBroken("a key without holders is remembered", invariant=49)
            while left:
                known = by_position.get(left.bit_length() - 1)
                if known is None or (key in known.keys) == (key in known.void):
                    raise InvariantBroken("an instance counts as holder of a key that is not among its keys", invariant=49)
                left &= ~known.bit

    def _next_part(self, keys: int) -> list[int]:
        """The keys after those of the last part. After the last key, and when keys were added or removed since the last part,
        the oldest ones: to skip those that were checked would cost 0.1 s in a full index. A wrong entry is still found, because
        no change removes it: all older ones are removed in time, or the changes end."""
        try:
            part = list(islice(self._unchecked, keys))
        except RuntimeError:  # the dict has changed
            part = []
        if not part:
            self._unchecked = iter(self._holders)
            part = list(islice(self._unchecked, keys))
        return part

    def _check_counts(self) -> None:
        known, debtors = list(self._known.values()), list(self._debtors.values())
        gone = [each for each in debtors if each.gone]
        counted = sum(len(each.keys) + len(each.void) for each in (*known, *gone))
        if self._total != counted:
            raise InvariantBroken(f"the prefix index counts {self._total} entries and has {counted}", invariant=49)
        if self._total > max(self.keys_max, len(self._known)):
            raise InvariantBroken(f"the prefix index has {self._total} entries of {self.keys_max}", invariant=49)
        if any((each.void or self._is_over(each)) and each.bit not in self._debtors for each in known):
            raise InvariantBroken("an instance has too many keys, which no change will drop", invariant=49)
        if sorted(self._numbers.values()) != sorted(self._known):
            raise InvariantBroken("the bits of the prefix index are not those of its instances", invariant=49)
        if self._gone != sum(each.bit for each in gone) or any(each.keys for each in gone):
            raise InvariantBroken("the bits of instances that are gone are not those with keys to be dropped", invariant=49)


def _forget_guess(known: KnownKeys, key: int) -> None:
    known.guesses.pop(key, None)
    known.earlier.pop(key, None)


def _merged(first: dict[int, int], second: dict[int, int]) -> dict[int, int]:
    """Both dictionaries merged, at the cost of the smaller one. No key is in both."""
    small, large = (first, second) if len(first) < len(second) else (second, first)
    large.update(small)
    return large
