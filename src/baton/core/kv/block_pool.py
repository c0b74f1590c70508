"""Holders of each block: requests, the prefix cache, moves. A block without a holder is free.

    free        no holder                                  take ->  owned
    owned       one or more requests hold it               give_back by the last ->  cached if the cache has it, else free
    cached      only the cache holds it: may be evicted    share ->  owned,  uncache ->  free
    pinned      a move holds it and no request does        unpin ->  as after give_back

Every block is in exactly one of the four at any time; `check()` proves it from the holders alone. A block's generation grows
each time it leaves `free`, so that a copy for an earlier use is distinguished from one for this use.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId, Generation


class BlockPool:
    __slots__ = ("_cached", "_free", "_generation", "_idle", "_moves", "_requests", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._free: list[BlockId] = [BlockId(block) for block in reversed(range(total))]
        self._requests = [0] * total
        self._moves = [0] * total
        self._cached = bytearray(total)
        self._generation = [0] * total
        self._idle = 0

    def __repr__(self) -> str:
        held = self.total - self.free - self._idle
        return f"<BlockPool {self.total}: {self.free} free, {self._idle} cached, {held} held>"

    # Queries

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def idle(self) -> int:
        """Number of blocks that only the cache holds."""
        return self._idle

    def is_idle(self, block: BlockId) -> bool:
        return bool(self._cached[block]) and not self._requests[block] and not self._moves[block]

    def is_cached(self, block: BlockId) -> bool:
        return bool(self._cached[block])

    def cached_blocks(self) -> list[BlockId]:
        return [BlockId(block) for block in compress(range(self.total), self._cached)]

    def is_pinned(self, block: BlockId) -> bool:
        return bool(self._moves[block])

    def request_references(self, block: BlockId) -> int:
        return self._requests[block]

    def generation(self, block: BlockId) -> Generation:
        return Generation(self._generation[block])

    # Requests

    def take(self, count: int) -> list[BlockId]:
        """Take free blocks, each with one request reference. The caller has made sure that there are enough."""
        if count > len(self._free):
            raise InvariantBroken(f"asked for {count} blocks with {len(self._free)} free", invariant=7)
        if not count:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for block in taken:
            self._requests[block] = 1
            self._generation[block] += 1
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a request reference to each block."""
        for block in blocks:
            if not self._requests[block]:
                if not self._cached[block]:
                    raise InvariantBroken(f"block {block} is shared but has no holder", invariant=3)
                if not self._moves[block]:
                    self._idle -= 1
            self._requests[block] += 1

    def give_back(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """Remove a request reference from each block. Returns the blocks that only the cache holds now."""
        idle: list[BlockId] = []
        for block in blocks:
            references = self._requests[block] - 1
            if references < 0:
                raise InvariantBroken(f"block {block} is given back by a request that does not hold it", invariant=2)
            self._requests[block] = references
            if not references and not self._moves[block]:
                self._rest(block, idle)
        return idle

    # Moves

    def pin(self, blocks: Iterable[BlockId]) -> None:
        """Hold these blocks for a move until it ends; another holder must exist already."""
        for block in blocks:
            if not (self._requests[block] or self._moves[block] or self._cached[block]):
                raise InvariantBroken(f"block {block} is pinned but has no holder", invariant=3)
            if self.is_idle(block):
                self._idle -= 1
            self._moves[block] += 1

    def unpin(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """End a move's hold. Returns the blocks that only the cache holds now."""
        idle: list[BlockId] = []
        for block in blocks:
            if not self._moves[block]:
                raise InvariantBroken(f"block {block} is unpinned without a pin", invariant=2)
            self._moves[block] -= 1
            if not self._moves[block] and not self._requests[block]:
                self._rest(block, idle)
        return idle

    # The cache

    def cache(self, block: BlockId) -> None:
        """Hold the block for the cache; a request does too, so it is not idle yet."""
        if self._cached[block] or not self._requests[block]:
            raise InvariantBroken(f"block {block} enters the cache twice or without an owner", invariant=14)
        self._cached[block] = 1

    def uncache(self, block: BlockId) -> None:
        """Release an idle block from the cache: it is free."""
        if not self.is_idle(block):
            raise InvariantBroken(f"block {block} is evicted while it is held", invariant=15)
        self._cached[block] = 0
        self._idle -= 1
        self._free.append(block)

    def uncache_idle(self) -> list[BlockId]:
        """The cache releases all idle blocks: they are free. Returns them."""
        idle = [BlockId(block) for block in compress(range(self.total), self.idle_flags())]
        for block in idle:
            self._cached[block] = 0
        self._free += idle
        self._idle = 0
        return idle

    def _rest(self, block: BlockId, idle: list[BlockId]) -> None:
        """Record that the last request or move has released the block."""
        if self._cached[block]:
            self._idle += 1
            idle.append(block)
        else:
            self._free.append(block)

    # Proof

    def idle_flags(self) -> list[bool]:
        """Whether each block is idle, by block."""
        holders = zip(self._cached, self._requests, self._moves, strict=True)
        return [bool(cached) and not requests and not moves for cached, requests, moves in holders]

    def cached_flags(self) -> list[bool]:
        return [bool(cached) for cached in self._cached]

    def generations(self) -> list[int]:
        return list(self._generation)

    def check_part(self, begin: int, end: int, held: dict[BlockId, int], pinned: dict[BlockId, int]) -> None:
        """1, 2, 17: no block is lost, and the holders of these blocks are the known ones. The cost does not depend on the size
        of the pool."""
        holding = len(held | pinned)
        if self.total - self.free - self._idle != holding:
            text = f"{self.total - self.free - self._idle} blocks are held, {holding} by tables and moves"
            raise InvariantBroken(text, invariant=1)
        for block in map(BlockId, range(begin, min(end, self.total))):
            if self._requests[block] != held.get(block, 0):
                raise InvariantBroken(f"block {block}: {self._requests[block]} request references", invariant=2)
            if self._moves[block] != pinned.get(block, 0):
                raise InvariantBroken("pins are not those of the moves under way", invariant=17)

    def check(self, held: dict[BlockId, int] | None = None, pinned: dict[BlockId, int] | None = None) -> None:
        """Invariants 1 to 3, from the holders alone. `held` counts the table entries that name each block, `pinned` the moves,
        if known.

        Whole lists are compared, because the simulator does this every few events; the wrong block is searched for only on
        failure.
        """
        free = [0] * self.total
        for block in self._free:
            free[block] += 1
        holders = [r + m + c for r, m, c in zip(self._requests, self._moves, self._cached, strict=True)]
        if free != [0 if count else 1 for count in holders]:
            wrong = next(b for b, (times, count) in enumerate(zip(free, holders, strict=True)) if times != (0 if count else 1))
            raise InvariantBroken(f"block {wrong}: {free[wrong]} times free, {holders[wrong]} holders", invariant=1)
        if (idle := sum(self.idle_flags())) != self._idle:
            raise InvariantBroken(f"{idle} blocks are idle, {self._idle} are counted", invariant=1)
        if held is not None:
            entries = [0] * self.total
            for block, count in held.items():
                entries[block] = count
            if entries != self._requests:
                wrong = next(b for b in range(self.total) if entries[b] != self._requests[b])
                raise InvariantBroken(
                    f"block {wrong}: {self._requests[wrong]} request references, {entries[wrong]} table entries", invariant=2
                )
        if pinned is not None and [pinned.get(BlockId(block), 0) for block in range(self.total)] != self._moves:
            raise InvariantBroken("pins are not those of the moves under way", invariant=17)
