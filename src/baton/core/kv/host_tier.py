"""State of the host pool: the key of each block, and the blocks that are being written or read.

    free      unused                                      take ->    writing
    writing   a move copies into it; it has no key yet    insert ->  cached,  discard ->  free
    cached    it has a key; a pinned one is being read    evicted when blocks are short, unless it is pinned
    orphan    forgotten while it was being read           unpin ->   free

The least recently used block is evicted first. Unlike the device's, this cache may have holes: a block is useful only behind a
leading run that is on the device or here, and `run` counts exactly that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from baton.core.kv.digest import HOST, CacheDigest
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockKey, HostBlockId


class HostTier:
    __slots__ = ("_block_of", "_free", "_key_of", "_pins", "_stored", "_unstored", "_writing", "digest", "evicted", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.evicted = 0
        self.digest: CacheDigest | None = None
        "Digest for routers. None: no router is configured."
        self._free = [HostBlockId(block) for block in reversed(range(total))]
        self._block_of: dict[BlockKey, HostBlockId] = {}
        "Blocks by key, ordered by last use."
        self._key_of: list[BlockKey | None] = [None] * total
        self._pins = [0] * total
        self._writing = bytearray(total)
        self._stored = bytearray(total)
        "Whether storage has the block too, as far as is known."
        self._unstored: dict[BlockKey, None] = {}
        "Keys that storage does not have, ordered by last use. They are found without visiting the others."

    def __len__(self) -> int:
        return len(self._block_of)

    # Queries

    @property
    def free(self) -> int:
        return len(self._free)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._block_of

    def block_of(self, key: BlockKey) -> HostBlockId | None:
        return self._block_of.get(key)

    def run(self, keys: Sequence[BlockKey], start: int, limit: int) -> int:
        """Number of keys[start:limit] that are here, without a hole."""
        place = start
        while place < limit and keys[place] in self._block_of:
            place += 1
        return place - start

    def index(self) -> dict[BlockKey, HostBlockId]:
        """A copy of the index, ordered by last use."""
        return dict(self._block_of)

    def key_of(self, block: HostBlockId) -> BlockKey | None:
        return self._key_of[block]

    def is_stored(self, key: BlockKey) -> bool:
        return bool(self._stored[self._block_of[key]])

    def oldest_unstored(self, count: int) -> list[BlockKey]:
        """Keys that storage does not have, in the order of eviction."""
        unpinned = (key for key in self._unstored if not self._pins[self._block_of[key]])
        return list(islice(unpinned, count))

    # Writing

    def take(self, count: int) -> list[HostBlockId]:
        """Up to `count` blocks to write into, evicting the least recently used ones."""
        if count > len(self._free):
            self.evict(count - len(self._free))
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        for block in taken:
            self._writing[block] = 1
        return taken

    def insert(self, key: BlockKey, block: HostBlockId, *, stored: bool = False, marked: bool = False) -> None:
        """Publish a completely written block under its key. If another block has the key already, this one is free again.
        `marked`: its place in its chain is marked, as far as is known."""
        self._end_writing(block)
        if key in self._block_of:
            self._free.append(block)
            return
        self._block_of[key] = block
        self._key_of[block] = key
        self._stored[block] = stored
        if not stored:
            self._unstored[key] = None
        if self.digest is not None:
            self.digest.add_to_host(key, marked=marked)

    def discard(self, block: HostBlockId) -> None:
        """Free a written block whose content is of no use."""
        self._end_writing(block)
        self._free.append(block)

    def _end_writing(self, block: HostBlockId) -> None:
        if not self._writing[block]:
            raise InvariantBroken(f"host block {block} is not being written", invariant=17)
        self._writing[block] = 0

    # Reading

    def pin(self, keys: Iterable[BlockKey]) -> list[HostBlockId]:
        """Hold these blocks for a move that reads them, until it ends."""
        blocks = [self._block_of[key] for key in keys]
        for block in blocks:
            self._pins[block] += 1
        return blocks

    def unpin(self, blocks: Iterable[HostBlockId]) -> None:
        for block in blocks:
            if not self._pins[block]:
                raise InvariantBroken(f"host block {block} is unpinned without a pin", invariant=2)
            self._pins[block] -= 1
            if not self._pins[block] and self._key_of[block] is None:
                self._free.append(block)

    def mark_stored(self, block: HostBlockId) -> None:
        key = self._key_of[block]
        if key is not None:  # otherwise it was forgotten while it was being put
            self._stored[block] = 1
            self._unstored.pop(key, None)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Mark the keys as used. The first of a chain count as the latest: a hole there makes all behind it useless."""
        for key in reversed(keys):
            block = self._block_of.pop(key, None)
            if block is not None:
                self._block_of[key] = block
                if key in self._unstored:
                    del self._unstored[key]
                    self._unstored[key] = None

    def clear(self) -> None:
        """Forget everything, because the memory was replaced. No move may be in progress."""
        if any(self._pins) or any(self._writing):
            raise InvariantBroken("the host tier is cleared while a move is under way", invariant=15)
        self.evict(len(self._block_of))

    def forget(self) -> None:
        """Forget all keys. Blocks that a move still reads are free when that move ends."""
        for block in self._block_of.values():
            self._key_of[block] = None
            self._stored[block] = 0
            if not self._pins[block]:
                self._free.append(block)
        self.evicted += len(self._block_of)
        self._block_of.clear()
        self._unstored.clear()
        if self.digest is not None:
            self.digest.clear(HOST)

    def evict(self, count: int) -> None:
        """Evict up to `count` blocks that no move reads, the least recently used first."""
        victims: list[tuple[BlockKey, HostBlockId]] = []
        for key, block in self._block_of.items():
            if len(victims) == count:
                break
            if not self._pins[block]:
                victims.append((key, block))
        for key, block in victims:
            del self._block_of[key]
            self._unstored.pop(key, None)
            self._key_of[block] = None
            self._stored[block] = 0
            self._free.append(block)
            if self.digest is not None:
                self.digest.remove(key, HOST)
        self.evicted += len(victims)

    # Proof

    def check_part(self, begin: int, end: int, read: dict[HostBlockId, int], written: dict[HostBlockId, int]) -> None:
        """1, 14, 17: no block is lost, and these blocks are in the state that moves and keys imply."""
        orphans = sum(self._key_of[block] is None for block in read)
        if self.total != len(self._free) + len(self._block_of) + len(written) + orphans:
            raise InvariantBroken("a host block is in no state, or in two", invariant=1)
        for block in map(HostBlockId, range(begin, min(end, self.total))):
            key = self._key_of[block]
            if key is not None and self._block_of.get(key) != block:
                raise InvariantBroken(f"host block {block} has a key that names another block", invariant=14)
            if (key is not None and not self._stored[block]) != (key in self._unstored):
                raise InvariantBroken("keys that storage does not have are listed wrong", invariant=14)
            if (self._pins[block], self._writing[block]) != (read.get(block, 0), written.get(block, 0)):
                raise InvariantBroken("pins of the host tier are not those of its moves", invariant=17)

    def check(self, read: dict[HostBlockId, int], written: dict[HostBlockId, int]) -> None:
        """1: every block is free, being written, cached or an orphan, exactly one of them. 17: moves hold exactly the pinned
        blocks."""
        states = [0] * self.total
        for block in self._free:
            states[block] += 1
        for key, block in self._block_of.items():
            states[block] += 1
            if self._key_of[block] != key:
                raise InvariantBroken(f"host block {block} has a key that names another block", invariant=14)
        for number, writing in enumerate(self._writing):
            states[number] += writing + (self._pins[number] > 0 and self._key_of[number] is None)
        if any(count != 1 for count in states):
            wrong = next(block for block, count in enumerate(states) if count != 1)
            raise InvariantBroken(f"host block {wrong} is in {states[wrong]} states", invariant=1)
        if list(self._unstored) != [key for key, block in self._block_of.items() if not self._stored[block]]:
            raise InvariantBroken("keys that storage does not have are listed wrong, or in another order", invariant=14)
        if [read.get(HostBlockId(block), 0) for block in range(self.total)] != self._pins:
            raise InvariantBroken("pins of the host tier are not those of its moves", invariant=17)
        if [written.get(HostBlockId(block), 0) for block in range(self.total)] != list(self._writing):
            raise InvariantBroken("host blocks are written that no move names, or twice", invariant=17)
