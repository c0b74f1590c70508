"""Blocks of a pool as bytes, to be sent over a network. Several threads may call at once.

in shared memory   the bytes themselves: sent from there, and received into it
on a GPU           by way of memory of the caller, and a few blocks of pinned memory; a copy of them takes a tenth of a
                   millisecond

The caller releases every view before the pool is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from baton.kvpool.base import Pool
from baton.kvpool.copies import TierCopies, tier_copies
from baton.kvpool.pool import KVPool

Runs = Sequence[tuple[int, int]]
"""Runs of contiguous blocks: (first block, number of blocks)."""
Spare = Callable[[int], memoryview]
"""Function that returns memory of the caller with this many bytes."""


class BlockBytes(Protocol):
    def read(self, runs: Runs, spare: Spare) -> list[memoryview]:
        """The bytes of these blocks, in order: their own memory, or a copy in `spare`."""
        ...

    def place(self, runs: Runs, spare: Spare) -> list[memoryview]:
        """Memory for new bytes of these blocks: their own, or `spare`."""
        ...

    def write(self, runs: Runs, placed: Sequence[memoryview]) -> None:
        """Complete new blocks, after the memory that `place` returned is filled."""
        ...

    def close(self) -> None: ...


def block_bytes(pool: Pool, blocks_max: int) -> BlockBytes:
    """Access to the pool's blocks as bytes. `blocks_max`: maximum of blocks per call."""
    return _InMemory(pool) if isinstance(pool, KVPool) else ByWayOfHost(pool, blocks_max)


class _InMemory:
    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def read(self, runs: Runs, spare: Spare) -> list[memoryview]:
        data = self._pool.data.view(np.uint8)
        return [data[first : first + blocks].reshape(-1).data for first, blocks in runs]

    place = read

    def write(self, runs: Runs, placed: Sequence[memoryview]) -> None:
        pass

    def close(self) -> None:
        pass


class ByWayOfHost:
    """Bytes of pools that only copies can reach."""

    def __init__(self, pool: Pool, blocks_max: int) -> None:
        self._host = KVPool.create(pool.layout, blocks_max, "baton-staging")
        self._copies: TierCopies = tier_copies(pool, self._host)
        self._lock = threading.Lock()
        "Lock that guards the pinned memory."

    def read(self, runs: Runs, spare: Spare) -> list[memoryview]:
        blocks = _blocks(runs)
        content = self.place(runs, spare)
        with self._lock:
            self._copies.store(blocks, range(len(blocks)))
            np.copyto(np.frombuffer(content[0], np.uint8), self._staged(len(blocks)))
        return content

    def place(self, runs: Runs, spare: Spare) -> list[memoryview]:
        return [spare(len(_blocks(runs)) * self._host.layout.block_bytes)]

    def write(self, runs: Runs, placed: Sequence[memoryview]) -> None:
        blocks = _blocks(runs)
        with self._lock:
            np.copyto(self._staged(len(blocks)), np.frombuffer(placed[0], np.uint8))
            self._copies.load(range(len(blocks)), blocks)

    def _staged(self, blocks: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self._host.data[:blocks].view(np.uint8).reshape(-1)

    def close(self) -> None:
        self._copies.close()
        self._host.close()


def release(views: Sequence[memoryview]) -> None:
    for view in views:
        view.release()


def _blocks(runs: Runs) -> list[int]:
    return [block for first, blocks in runs for block in range(first, first + blocks)]
