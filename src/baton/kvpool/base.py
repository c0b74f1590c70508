"""What a KV pool is to who only passes it on: in shared memory (pool.py) or on a GPU (device_pool.py)."""

from __future__ import annotations

from typing import Protocol

from baton.kvpool.layout import KVLayout
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PoolReady


class Pool(Protocol):
    layout: KVLayout
    blocks: int
    incarnation: PoolIncarnation
    "Which pool this is: a restarted worker that finds the same one may go on with what is in it."
    fd: int
    "Passed on with the announcement."

    def announcement(self) -> PoolReady: ...

    def reading_descriptor(self) -> int:
        """One more descriptor, for somebody who reads; it is the caller's to close."""
        ...

    def close(self) -> None: ...
