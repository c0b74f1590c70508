"""Blocks of a pool as bytes, for who sends them over a network. What is copied is copied when a call returns: nothing of the
pool is referred to between two calls, so it may be closed at any time.

in shared memory   the bytes themselves
on a GPU           by way of a few blocks of pinned memory; a copy of them takes a tenth of a millisecond
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from baton.kvpool.base import Pool
from baton.kvpool.copies import TierCopies, tier_copies
from baton.kvpool.pool import KVPool


class BlockBytes(Protocol):
    def read(self, first: int, blocks: int) -> bytes: ...

    def write(self, first: int, content: bytearray | memoryview) -> None:
        """Whole blocks."""
        ...

    def close(self) -> None: ...


def block_bytes(pool: Pool, blocks_max: int) -> BlockBytes:
    """`blocks_max`: of one call."""
    return _InMemory(pool) if isinstance(pool, KVPool) else ByWayOfHost(pool, blocks_max)


class _InMemory:
    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def read(self, first: int, blocks: int) -> bytes:
        return self._pool.data[first : first + blocks].tobytes()

    def write(self, first: int, content: bytearray | memoryview) -> None:
        numbers = np.frombuffer(content, self._pool.data.dtype).reshape(-1, self._pool.data.shape[1])
        self._pool.data[first : first + len(numbers)] = numbers

    def close(self) -> None:
        pass


class ByWayOfHost:
    """For pools that only copies can reach."""

    def __init__(self, pool: Pool, blocks_max: int) -> None:
        self._host = KVPool.create(pool.layout, blocks_max, "baton-staging")
        self._bytes = _InMemory(self._host)
        self._copies: TierCopies = tier_copies(pool, self._host)

    def read(self, first: int, blocks: int) -> bytes:
        self._copies.store(range(first, first + blocks), range(blocks))
        return self._bytes.read(0, blocks)

    def write(self, first: int, content: bytearray | memoryview) -> None:
        self._bytes.write(0, content)
        blocks = len(content) // self._host.layout.block_bytes
        self._copies.load(range(blocks), range(first, first + blocks))

    def close(self) -> None:
        self._copies.close()
        self._host.close()
