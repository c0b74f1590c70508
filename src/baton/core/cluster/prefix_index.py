"""Which instances probably have which prefix cached: an index from block keys to instances, with one bound for the router.

    add(instance, keys)      the instance computes or receives these blocks (a prompt's chain, from its first block on)
    remove(instance, key)    the instance has evicted the block
    forget(instance)         the instance is gone

The router feeds the index with guesses, from the requests that it has sent: the instance evicts when it wants to, and other
routers send to it too. A wrong guess costs time, never an answer.

An instance has a key only together with all keys before it in the chain: `add` makes the first block the most recent one, so
the ends of chains are forgotten first, and callers of `remove` remove ends first. So the holders of a chain's keys are nested,
and depths are found by bisection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.errors import InvariantBroken
from baton.protocol.ids import BlockKey

Holders = dict[int, None]
"""Numbers of instances. A dict, because its order is that of insertion on every machine."""


class PrefixIndex:
    __slots__ = ("_holders", "_keys", "_limits", "_total", "keys_max")

    def __init__(self, keys_max: int) -> None:
        self.keys_max = keys_max
        "Bound for the entries of all instances together."
        self._holders: dict[BlockKey, int | Holders] = {}
        "A single holder is stored as its number: most keys have one holder, and a dict takes 200 bytes more."
        self._keys: dict[int, dict[BlockKey, None]] = {}
        "Keys of each instance, the least recently used first."
        self._limits: dict[int, int] = {}
        "Number of blocks in the pool of each instance."
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def count(self, number: int) -> int:
        return len(self._keys.get(number, ()))

    # Changes

    def join(self, number: int, blocks_max: int) -> None:
        """Add an instance with a pool of `blocks_max` blocks. The shares of all others become smaller."""
        self._keys[number] = {}
        self._limits[number] = max(1, blocks_max)
        share = self._share
        for other in self._keys:
            self._trim(other, share)

    def add(self, number: int, keys: Sequence[BlockKey]) -> None:
        """The instance has this chain. The first block is added last: a chain is useful only from its beginning on, so its end
        is forgotten first."""
        known, holders = self._keys[number], self._holders
        before = len(known)
        for key in reversed(keys):
            if key in known:
                del known[key]
            else:
                found = holders.get(key)
                if found is None:
                    holders[key] = number
                elif type(found) is int:
                    holders[key] = {found: None, number: None}
                else:
                    found[number] = None  # type: ignore[index]
            known[key] = None
        self._total += len(known) - before
        self._trim(number, self._share)

    def remove(self, number: int, key: BlockKey) -> None:
        known = self._keys.get(number)
        if known is not None and key in known:
            del known[key]
            self._total -= 1
            self._drop(number, key)

    def forget(self, number: int) -> None:
        """The instance is gone, or has lost its cache."""
        known = self._keys.pop(number, {})
        self._limits.pop(number, None)
        self._total -= len(known)
        for key in known:
            self._drop(number, key)

    @property
    def _share(self) -> int:
        return max(1, self.keys_max // max(1, len(self._keys)))

    def _trim(self, number: int, share: int) -> None:
        known, limit = self._keys[number], min(self._limits[number], share)
        while len(known) > limit:
            key = next(iter(known))
            del known[key]
            self._total -= 1
            self._drop(number, key)

    def _drop(self, number: int, key: BlockKey) -> None:
        found = self._holders[key]
        if type(found) is int:
            del self._holders[key]
            return
        del found[number]  # type: ignore[union-attr]
        if len(found) == 1:  # type: ignore[arg-type]
            self._holders[key] = next(iter(found))  # type: ignore[arg-type]

    # Questions

    def leading(self, number: int, keys: Sequence[BlockKey]) -> int:
        """Number of leading blocks that this instance has."""
        known = self._keys[number]
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in known:
                low = middle + 1
            else:
                high = middle
        return low

    def has(self, number: int, key: BlockKey) -> bool:
        return key in self._keys[number]

    def holders(self, key: BlockKey) -> Holders:
        found = self._holders.get(key)
        if found is None:
            return {}
        return {found: None} if type(found) is int else found  # type: ignore[return-value]

    def levels(self, keys: Sequence[BlockKey]) -> Iterator[tuple[int, Holders]]:
        """Depths at which this chain ends for some instances, deepest first, each with all instances that have at least that
        depth."""
        holders = self._holders
        low, high = 0, len(keys)
        while low < high:  # the first key that no instance has
            middle = (low + high) // 2
            if keys[middle] in holders:
                low = middle + 1
            else:
                high = middle
        while low > 0:
            found = self.holders(keys[low - 1])
            yield low, found
            size, high = len(found), low - 1
            low = 0
            if self._size(keys[0]) == size:  # the usual case: instances that have its beginning have all of a shared prefix
                return
            while low < high:  # the first key that has the same holders
                middle = (low + high) // 2
                if self._size(keys[middle]) > size:
                    low = middle + 1
                else:
                    high = middle

    def _size(self, key: BlockKey) -> int:
        found = self._holders[key]
        return 1 if type(found) is int else len(found)  # type: ignore[arg-type]

    def check(self) -> None:
        if self._total != sum(map(len, self._keys.values())) or self._total > max(self.keys_max, len(self._keys)):
            raise InvariantBroken(f"the prefix index has {self._total} entries of {self.keys_max}", invariant=49)
        if len(self._holders) > self._total:
            raise InvariantBroken(f"{len(self._holders)} keys have holders, {self._total} are known", invariant=49)
