"""Computed blocks by key: longest-prefix match, insert, evict. Costs do not depend on how much is cached.

Two facts carry the design, and `check()` proves both:

  closed   a cached block's parent is cached.      Eviction takes leaves only; nothing is inserted without its parent.
  covered  a held cached block's parent is held.   A table holds every block before the ones it holds; a request that
                                                   computed a block which another published first is folded onto it.

From *closed*: which keys of a chain are cached is a leading run, so the longest match is found by bisection. From
*covered*: every idle block can be evicted, leaves first, so `available` is a plain sum and a promise that `take` keeps.

    chain    k0 --- k1 --- k2 --- k3 --- k4 --- k5
    cached   yes    yes    yes    yes    no     no         match: 4, by asking for k3, k5, k4
    held     yes    yes    no     no
    heap                          k3                       idle leaves only; k2 enters when k3 goes
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from baton.core.kv.block_pool import BlockPool
from baton.core.kv.digest import DEVICE, CacheDigest
from baton.core.kv.eviction import EvictionPolicy, SortKey
from baton.core.kv.marks import is_mark
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId, BlockKey

NO_PARENT = BlockId(-1)


class PrefixCache:
    __slots__ = (
        "_block_of",
        "_children",
        "_depth",
        "_heap",
        "_hits",
        "_key_of",
        "_last_used",
        "_parent",
        "_policy",
        "_tick",
        "digest",
        "evicted",
        "pool",
    )

    def __init__(self, pool: BlockPool, policy: EvictionPolicy) -> None:
        self.pool = pool
        self.evicted = 0
        self._policy = policy
        self._block_of: dict[BlockKey, BlockId] = {}
        self._key_of: list[BlockKey | None] = [None] * pool.total
        self._parent = [NO_PARENT] * pool.total
        self._children = [0] * pool.total
        self._depth = [0] * pool.total
        "Place of each block in its chain, counted from 1. Kept until the block is published again. Unused without a digest."
        self.digest: CacheDigest | None = None
        "Digest for routers, set before any block is published. None: no router is configured."
        self._last_used = [0] * pool.total
        self._hits = [0] * pool.total
        self._heap: list[tuple[SortKey, BlockId]] = []
        self._tick = 0

    def __len__(self) -> int:
        return len(self._block_of)

    # Queries: they change nothing

    @property
    def available(self) -> int:
        """Blocks that `take` can return now, evicting if it must."""
        return self.pool.free + self.pool.idle

    def match(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Number of the first `limit` keys that are cached. Bisection, because the cached keys are a leading run."""
        low, high = 0, limit
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._block_of:
                low = middle + 1
            else:
                high = middle
        return low

    def idle_among(self, keys: Sequence[BlockKey], hit: int) -> int:
        """Number of the first `hit` keys, all cached, that are idle. Bisection: the held blocks are a leading run."""
        low, high = 0, hit
        while low < high:
            middle = (low + high) // 2
            if self.pool.is_idle(self._block_of[keys[middle]]):
                high = middle
            else:
                low = middle + 1
        return hit - low

    def blocks_of(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Blocks of these cached keys."""
        return [self._block_of[key] for key in keys]

    def block_of(self, key: BlockKey) -> BlockId | None:
        return self._block_of.get(key)

    def index(self) -> dict[BlockKey, BlockId]:
        """A copy of the index: all cached blocks by key."""
        return dict(self._block_of)

    def key_of(self, block: BlockId) -> BlockKey | None:
        return self._key_of[block]

    @property
    def changes(self) -> int:
        """Counter that grows whenever blocks become idle or are evicted."""
        return self._tick + self.evicted

    def coldest(self, count: int) -> list[tuple[BlockKey, BlockId]]:
        """The first `count` idle blocks in the order of eviction, each leaf with the blocks that become leaves after it. Costs
        as many heap operations as leaves are visited: they are taken off the heap and put back. Stale entries on the way are
        dropped for good."""
        found: dict[BlockId, BlockKey] = {}
        skipped: list[tuple[SortKey, BlockId]] = []
        heap = self._heap
        while heap and len(found) < count:
            entry = heappop(heap)
            if not self._is_current(*entry) or entry[1] in found:
                continue
            skipped.append(entry)
            block = entry[1]
            while block != NO_PARENT and block not in found and self.pool.is_idle(block) and len(found) < count:
                key = self._key_of[block]
                assert key is not None
                found[block] = key
                block = self._parent[block]
        for entry in skipped:
            heappush(heap, entry)
        return [(key, block) for block, key in found.items()]

    def marked_keys(self) -> list[BlockKey]:
        """Keys of all cached blocks at marked places, found by the parents."""
        found: list[BlockKey] = []
        for key, block in self._block_of.items():
            depth, above = 1, self._parent[block]
            while above != NO_PARENT:
                depth, above = depth + 1, self._parent[above]
            if is_mark(depth):
                found.append(key)
        return found

    def is_marked(self, block: BlockId) -> bool:
        """Whether the block is, or was when it was last cached, at a marked place of its chain."""
        return is_mark(self._depth[block])

    def hits_of(self, block: BlockId) -> int:
        return self._hits[block]

    # Holders

    def acquire(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Hold the blocks of these cached keys."""
        blocks = self.blocks_of(keys)
        self.pool.share(blocks)
        for block in blocks:
            self._hits[block] += 1
        return blocks

    def take(self, count: int) -> list[BlockId]:
        """Take blocks, evicting as many idle ones as needed. All or nothing; the caller has checked `available`."""
        if count > self.available:
            raise InvariantBroken(f"asked for {count} blocks with {self.available} available", invariant=7)
        short = count - self.pool.free
        if short > 0:
            self.evict(short)
        return self.pool.take(count)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Release a request's blocks. Cached blocks stay and may be hit again, the others are free."""
        self._settle(self.pool.give_back(blocks))

    def pin(self, blocks: Sequence[BlockId]) -> None:
        """Hold these blocks for a move. Cached ones must be a leading run, or *covered* breaks."""
        self.pool.pin(blocks)

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        self._settle(self.pool.unpin(blocks))

    # Contents

    def insert(self, key: BlockKey, parent: BlockId, block: BlockId) -> BlockId:
        """Publish a computed block. Returns the block that has the key from now on.

        If another block was first, that one is returned and nothing changes: the caller folds onto it. A block is never
        replaced under its key. A parent that is no longer cached means that the chain is broken; the block stays private.
        """
        first = self._block_of.get(key)
        if first is not None:
            return first
        if self.pool.is_pinned(block):
            raise InvariantBroken(f"block {block} is published while a move holds it", invariant=17)
        if parent != NO_PARENT:
            if self._key_of[parent] is None:
                return block
            self._children[parent] += 1
        self.pool.cache(block)
        self._block_of[key] = block
        self._key_of[block] = key
        self._parent[block] = parent
        self._children[block] = 0
        self._hits[block] = 0
        if self.digest is not None:
            depth = self._depth[block] = 1 if parent == NO_PARENT else self._depth[parent] + 1
            if is_mark(depth):
                self.digest.add(key)
        return block

    def publish(self, keys: Sequence[BlockKey], table: list[BlockId], place: int) -> bool:
        """Publish the block at this place of a table, whose holder holds all before it. False: another block was first; the
        table names that one from now on, and its own is released."""
        own = table[place]
        first = self.insert(keys[place], table[place - 1] if place else NO_PARENT, own)
        if first == own:
            return True
        self.acquire(keys[place : place + 1])
        table[place] = first
        self.release((own,))
        return False

    def evict(self, count: int) -> int:
        """Evict up to `count` idle blocks in the policy's order, leaves first. Returns how many were evicted."""
        gone = 0
        heap, pool = self._heap, self.pool
        while gone < count and heap:
            sort_key, block = heappop(heap)
            if self._is_current(sort_key, block):
                self._forget(block)
                pool.uncache(block)
                gone += 1
        self.evicted += gone
        return gone

    def clear(self) -> None:
        """Forget everything. No block may be held: it would be published under keys that are forgotten."""
        if self.pool.idle != len(self._block_of):
            held = next(block for block in self._block_of.values() if not self.pool.is_idle(block))
            raise InvariantBroken(f"the cache is cleared while block {held} is held", invariant=15)
        self.clear_idle()

    def clear_idle(self) -> int:
        """Evict all idle blocks in one pass, and return their number. Held blocks stay, and so do their ancestors (*covered*).

        The lists are created anew, and the heap is empty, because it names idle blocks only: evicting block by block takes
        seconds with a large pool, in which the engine does not answer.
        """
        idle = self.pool.uncache_idle()
        held = self.pool.cached_blocks()
        if self.digest is not None:
            self._remove_from_digest(idle, whole=not held)
        key_of, parent_of, total = self._key_of, self._parent, self.pool.total
        self.evicted += len(idle)
        self._heap.clear()
        self._block_of.clear()
        self._key_of, self._parent, self._children = [None] * total, [NO_PARENT] * total, [0] * total
        for block in held:
            key, parent = key_of[block], parent_of[block]
            assert key is not None
            self._block_of[key] = block
            self._key_of[block], self._parent[block] = key, parent
            if parent != NO_PARENT:
                self._children[parent] += 1
        return len(idle)

    def _remove_from_digest(self, blocks: Sequence[BlockId], *, whole: bool) -> None:
        """These blocks were evicted. `whole`: no others are cached."""
        assert self.digest is not None
        if whole:
            self.digest.clear(DEVICE)
            return
        for block in blocks:
            key = self._key_of[block]
            if key is not None and is_mark(self._depth[block]):
                self.digest.remove(key, DEVICE)

    def _forget(self, block: BlockId) -> None:
        key, parent = self._key_of[block], self._parent[block]
        assert key is not None
        del self._block_of[key]
        self._key_of[block] = None
        self._parent[block] = NO_PARENT
        if self.digest is not None and is_mark(self._depth[block]):
            self.digest.remove(key, DEVICE)
        if parent != NO_PARENT:
            self._children[parent] -= 1
            self._offer(parent)

    def _settle(self, idle: list[BlockId]) -> None:
        """Stamp blocks that have just become idle, and offer the leaves for eviction."""
        self._tick += 1
        for block in idle:
            self._last_used[block] = self._tick
        for block in idle:
            self._offer(block)
        if len(self._heap) > 2 * self.pool.idle + 64:
            self._compact()

    def _offer(self, block: BlockId) -> None:
        if not self._children[block] and self.pool.is_idle(block):
            heappush(self._heap, (self._policy(self._last_used[block], self._hits[block]), block))

    def _is_current(self, sort_key: SortKey, block: BlockId) -> bool:
        """Whether an entry of the heap is valid. It is stale if its block was used again or gained a child: then it is skipped
        here, never searched for."""
        return (
            self.pool.is_idle(block)
            and not self._children[block]
            and sort_key == self._policy(self._last_used[block], self._hits[block])
        )

    def _compact(self) -> None:
        """Drop stale entries when they outnumber the blocks they could name. Amortised over the releases that made them."""
        self._heap = list(dict.fromkeys(entry for entry in self._heap if self._is_current(*entry)))
        heapify(self._heap)

    # Proof

    def eviction_order(self) -> list[BlockId]:
        """Idle leaves in the order of eviction, found the slow and obvious way (invariant 20)."""
        leaves = [BlockId(b) for b in range(self.pool.total) if self.pool.is_idle(BlockId(b)) and not self._children[b]]
        return sorted(leaves, key=lambda b: (self._policy(self._last_used[b], self._hits[b]), b))

    def check_part(self, begin: int, end: int) -> None:
        """11, 14, 15 for blocks `begin` to `end` only: the cost does not depend on the size of the pool."""
        for block in map(BlockId, range(begin, min(end, self.pool.total))):
            key, parent = self._key_of[block], self._parent[block]
            if (key is not None) != self.pool.is_cached(block) or (key is not None and self._block_of.get(key) != block):
                raise InvariantBroken(f"block {block}: pool, index and key disagree about what is cached", invariant=14)
            if key is None or parent == NO_PARENT:
                continue
            if self._key_of[parent] is None or not self._children[parent]:
                raise InvariantBroken(f"block {block}: its parent {parent} is not cached", invariant=11)
            if self.pool.is_idle(parent) and not self.pool.is_idle(block):
                raise InvariantBroken(f"block {block} is held and its parent {parent} is not", invariant=15)

    def check(self) -> None:
        """Invariants 11, 14, 15: index and blocks agree, the cache is closed and covered. 20: idle leaves are offered."""
        idle, key_of = self.pool.idle_flags(), self._key_of
        if [key is not None for key in key_of] != self.pool.cached_flags() or sum(self.pool.cached_flags()) != len(self):
            raise InvariantBroken("pool, index and blocks disagree about what is cached", invariant=14)
        children = [0] * self.pool.total
        for key, block in self._block_of.items():
            if key_of[block] != key:
                raise InvariantBroken(f"block {block} has a key that names another block", invariant=14)
            parent = self._parent[block]
            if parent == NO_PARENT:
                continue
            children[parent] += 1
            if key_of[parent] is None:
                raise InvariantBroken(f"block {block}: its parent {parent} is not cached", invariant=11)
            if idle[parent] and not idle[block]:
                raise InvariantBroken(f"block {block} is held and its parent {parent} is not", invariant=15)
        if children != self._children:
            raise InvariantBroken("the child counts are off", invariant=14)
        offered = sorted(dict.fromkeys(block for sort_key, block in self._heap if self._is_current(sort_key, block)))
        if offered != [block for block in range(self.pool.total) if idle[block] and not children[block]]:
            raise InvariantBroken("an idle leaf is not offered for eviction", invariant=20)
