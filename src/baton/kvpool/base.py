"""The interface of a KV pool to code that only passes it on: in shared memory (pool.py) or on a GPU (device_pool.py)."""

from __future__ import annotations

from typing import Protocol

from baton.kvpool.layout import KVLayout
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PoolReady


class Pool(Protocol):
    layout: KVLayout
    blocks: int
    incarnation: PoolIncarnation
    "Incarnation of the pool: a restarted worker that finds the same one may use its content."
    fd: int
    "Descriptor of the pool's memory, sent along with the announcement."

    def announcement(self) -> PoolReady: ...

    def reading_descriptor(self) -> int:
        """A second descriptor, for a reader; the caller closes it."""
        ...

    def close(self) -> None: ...
