"""Blocks of a pool as bytes, to be sent over a network. A copy is complete when a call returns: no reference to the pool
remains between two calls, so it may be closed at any time.

in shared memory   the bytes themselves
on a GPU           by way of a few blocks of pinned memory; a copy of them takes a tenth of a millisecond
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.kvpool.base import Pool
from baton.kvpool.copies import TierCopies, tier_copies
from baton.kvpool.pool import KVPool


class BlockBytes(Protocol):
    """`content` has the size of whole blocks."""

    def read(self, first: int, content: memoryview) -> None:
        """Copy the blocks into `content`."""
        ...

    def write(self, first: int, content: memoryview) -> None: ...

    def close(self) -> None: ...


def block_bytes(pool: Pool, blocks_max: int) -> BlockBytes:
    """`blocks_max`: most blocks of one call."""
    return _InMemory(pool) if isinstance(pool, KVPool) else ByWayOfHost(pool, blocks_max)


class _InMemory:
    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def read(self, first: int, content: memoryview) -> None:
        numbers = self._numbers(content)
        np.copyto(numbers, self._pool.data[first : first + len(numbers)])

    def write(self, first: int, content: memoryview) -> None:
        numbers = self._numbers(content)
        np.copyto(self._pool.data[first : first + len(numbers)], numbers)

    def _numbers(self, content: memoryview) -> NDArray[Any]:
        data = self._pool.data
        return np.frombuffer(content, data.dtype).reshape(-1, data.shape[1])

    def close(self) -> None:
        pass


class ByWayOfHost:
    """For pools that only copies can reach."""

    def __init__(self, pool: Pool, blocks_max: int) -> None:
        self._host = KVPool.create(pool.layout, blocks_max, "baton-staging")
        self._bytes = _InMemory(self._host)
        self._copies: TierCopies = tier_copies(pool, self._host)

    def read(self, first: int, content: memoryview) -> None:
        blocks = len(content) // self._host.layout.block_bytes
        self._copies.store(range(first, first + blocks), range(blocks))
        self._bytes.read(0, content)

    def write(self, first: int, content: memoryview) -> None:
        blocks = len(content) // self._host.layout.block_bytes
        self._bytes.write(0, content)
        self._copies.load(range(blocks), range(first, first + blocks))

    def close(self) -> None:
        self._copies.close()
        self._host.close()
