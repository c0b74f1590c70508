"""Transfer: copies blocks between the device pool, the host pool and storage, and reports how far it got.

    event loop         submit(message) ...................... report(result)
    memory thread        store, load: one after the other           ^
    storage threads      query, put, fetch: several at once --------+

A copy in memory is one run of bytes and takes microseconds, so one thread does them all, in the order of arrival. Storage may
be slow: its threads access host blocks only, which the core holds for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Final

from baton.errors import DeviceError, StorageFailed
from baton.kvcache.storage.backend import Deadline, StorageBackend
from baton.kvpool.base import Pool
from baton.kvpool.copies import TierCopies, tier_copies
from baton.kvpool.pool import KVPool
from baton.protocol.moves import BlockMove, MoveResult, StorageAnswer, StorageQuery, unpack_tokens

logger = logging.getLogger("baton.cache")

STORAGE_THREADS: Final = 4
Report = Callable[[MoveResult | StorageAnswer], None]
"""Callback for results, called on any thread, once per message."""


class Transfer:
    def __init__(self, host: KVPool, storage: StorageBackend | None, report: Report) -> None:
        self.host = host
        self.storage = storage
        self._report = report
        self._device: Pool | None = None
        self._copies: TierCopies | None = None
        "Copies blocks; used only on the memory thread."
        self._memory = ThreadPoolExecutor(1, "baton-copy")
        self._slow = ThreadPoolExecutor(STORAGE_THREADS, "baton-storage")

    def attach(self, pool: Pool) -> None:
        """Attach the device pool. A move names its pool; a move of another pool copies nothing."""
        self._memory.submit(self._set_device, pool).result()

    def detach(self) -> Pool | None:
        """Detach the pool. When this returns no copy from or to it is in progress."""
        gone: Pool | None = self._memory.submit(self._set_device, None).result()
        return gone

    def _set_device(self, pool: Pool | None) -> Pool | None:
        if self._copies is not None:
            self._copies.close()
        old, self._device = self._device, pool
        self._copies = None if pool is None else tier_copies(pool, self.host)
        return old

    def submit(self, message: BlockMove | StorageQuery) -> Future[None]:
        if not isinstance(message, StorageQuery) and message.kind in ("store", "load"):
            return self._memory.submit(self._copy, message)
        deadline = Deadline.after(message.seconds_max)  # from now on, not from the moment when a thread is free
        if isinstance(message, StorageQuery):
            return self._slow.submit(self._query, message, deadline)
        return self._slow.submit(self._move, message, deadline)

    def close(self) -> None:
        self._memory.shutdown(cancel_futures=True)
        if self._copies is not None:
            self._copies.close()
        self._slow.shutdown(wait=False, cancel_futures=True)
        if self.storage is not None:
            self.storage.close()

    # Memory

    def _copy(self, move: BlockMove) -> None:
        """Copy blocks between device and host, on the memory thread, and report the result."""
        pool, copies = self._device, self._copies
        if pool is None or copies is None or pool.incarnation != move.pool:
            self._report(MoveResult(move.id, 0, error="another pool is attached"))
            return
        begun = perf_counter()
        try:
            if move.kind == "store":
                copies.store(move.device, move.host)
            else:
                copies.load(move.host, move.device)
        except DeviceError as error:
            self._report(MoveResult(move.id, 0, error=str(error)))
        else:
            self._report(MoveResult(move.id, len(move.host), perf_counter() - begun))

    # Storage

    def _query(self, query: StorageQuery, deadline: Deadline) -> None:
        assert self.storage is not None
        try:
            found = self.storage.contains_prefix(query.keys, deadline, self._tokens(query))
            self._report(StorageAnswer(query.id, found))
        except StorageFailed as failed:
            self._report(StorageAnswer(query.id, 0, str(failed)))

    def _tokens(self, message: BlockMove | StorageQuery) -> tuple[int, ...] | None:
        assert self.storage is not None
        return unpack_tokens(message.tokens) if self.storage.wants_tokens else None

    def _move(self, move: BlockMove, deadline: Deadline) -> None:
        assert self.storage is not None
        blocks = [memoryview(self.host.data[block]).cast("B") for block in move.host]
        begun, error = perf_counter(), None
        try:
            act = self.storage.put if move.kind == "put" else self.storage.get
            moved = act(move.keys, blocks, deadline, self._tokens(move))
        except StorageFailed as failed:
            moved, error = failed.done, str(failed)
        self._report(MoveResult(move.id, moved, perf_counter() - begun, error))
