"""The cache service's process: attaches KV pools and hands moves to kvcache/.

It serves one pool at a time, until its control channel ends:

    PoolReady + descriptor   over the descriptor socket: map that pool instead of the one before, verify it, confirm with
                             PoolAttached over the control channel
    HostPoolReady + desc.    over the descriptor socket: the memory of the host tier, as the service before had it
    ReadersSocket + desc.    over the descriptor socket: where messengers of other machines dial
    CreatePool               over the control channel (messenger): create the pool, announce it with PoolReady + descriptor
    DetachPool               over the control channel: unmap that pool, confirm with PoolDetached

With the first pool it has all that it needs: when the tiers (if any) are prepared it sends CacheHello, and accepts moves.
transfer.py moves blocks between device, host and storage, messenger.py between instances.

The engine sends PoolReady right after this process was started, if there is a pool by then, and again whenever there is another
(created by a restarted worker). Any error in here ends the process; the engine starts another and sends it the pool again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from concurrent.futures import Future

from baton.config import CacheConfig
from baton.errors import EngineError, InvalidConfig, PeerError
from baton.kvcache import shared_memory, tcp
from baton.kvcache.messenger import Messenger
from baton.kvcache.shared_memory import SharedMemory
from baton.kvcache.storage.backend import IdentifiedBackend, LayoutName, StorageBackend
from baton.kvcache.storage.open import open_backend
from baton.kvcache.tcp import Tcp
from baton.kvcache.transfer import Transfer
from baton.kvcache.transport import Transport
from baton.kvpool.base import Pool
from baton.kvpool.layout import KVLayout
from baton.kvpool.memory import GIB, main_memory
from baton.kvpool.open import attach_pool, create_pool
from baton.kvpool.pool import KVPool
from baton.observe.logs import configure
from baton.protocol.codec import Message
from baton.protocol.control import CacheHello, CacheStats, StartFailed
from baton.protocol.ids import PoolIncarnation
from baton.protocol.moves import BlockMove, MoveResult, StorageAnswer, StorageIdentity, StorageQuery
from baton.protocol.pool import (
    CreatePool,
    DetachPool,
    HostPoolReady,
    PoolAttached,
    PoolDetached,
    PoolReady,
    ReadersSocket,
    of_rank,
)
from baton.runtime.credentials import credentials_of
from baton.runtime.processes.children import begin_child
from baton.runtime.processes.loop_lag import LoopLag
from baton.runtime.processes.process_table import CONTROL, DESCRIPTORS
from baton.runtime.processes.rank_lock import one_rank_at_a_time
from baton.runtime.wire.channel import Channel
from baton.runtime.wire.descriptors import receive_descriptor, send_descriptor
from baton.worker.platforms.visible import use_only

NICENESS = 5
"""Niceness. On few cores the worker comes first: a copy may wait for a millisecond, a step may not."""


COUNTERS_SECONDS = 1.0
"""Least seconds between two messages with counters, which are sent before a result of a move or soon after one."""


class CacheProcess:
    def __init__(self, config: CacheConfig, control: Channel, link: socket.socket) -> None:
        self._config = config
        self._control = control
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._lag = LoopLag()
        self.pool: Pool | None = None
        self._host: KVPool | None = None
        self._kept = False
        self._storage: StorageBackend | None = None
        self._transfer: Transfer | None = None
        self._messenger: Messenger | None = None
        self._tcp: Tcp | None = None
        if config.peer or config.cluster_secret:
            self._messenger = Messenger(self._transports(config), self._report, config.wire)
        self._preparing: asyncio.Task[None] | None = None
        self._counters_due = 0.0
        self._counters_timer: asyncio.TimerHandle | None = None
        self._broken: asyncio.Future[None] = self._loop.create_future()
        "Error of a thread or task; it ends the process."

    def _transports(self, config: CacheConfig) -> dict[str, Transport]:
        """Transports for our pool's readers, and for reading other instances' pools."""
        served = {address.partition(":")[0]: address for address in config.peer.split()}
        transports: dict[str, Transport] = {
            shared_memory.SCHEME: SharedMemory(served.get(shared_memory.SCHEME, ""), config.wire)
        }
        if config.cluster_secret:
            address = served.get(tcp.SCHEME, "")
            self._tcp = transports[tcp.SCHEME] = Tcp(
                credentials_of(config), address, config.wire, name=config.name, digest=config.transfer_digest
            )
        return transports

    async def run(self) -> None:
        """Run until the engine closes the channel."""
        tasks = {asyncio.create_task(self._read_descriptors()), asyncio.create_task(self._control.listen(self.on_message))}
        try:
            done, _ = await asyncio.wait({*tasks, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            for end in done:
                end.result()
        finally:
            for task in tasks:
                task.cancel()
            if self._transfer is not None:
                self._transfer.close()
            if self._messenger is not None:
                self._messenger.close()

    def on_message(self, message: Message) -> None:
        """Handle a message of the engine: moves and queries to their part of kvcache/, orders about pools here."""
        match message:
            case BlockMove(kind="pull"):
                if self._messenger is not None:
                    self._messenger.submit(message).add_done_callback(self._taken)
                else:
                    self._control.send(MoveResult(message.id, 0, error="there is no messenger"))
            case BlockMove() | StorageQuery():
                if self._transfer is None:
                    raise PeerError(f"a {type(message).__name__} came before the tiers were there")
                self._transfer.submit(message).add_done_callback(self._taken)
            case StorageIdentity(identity):
                if isinstance(self._storage, IdentifiedBackend):
                    self._storage.identify(identity)
            case CreatePool():
                self.create(message)
            case DetachPool(incarnation):
                if self.pool is not None and self.pool.incarnation == incarnation:
                    self.detach()
                self._control.send(PoolDetached(incarnation))

    # The pool of the device

    def create(self, order: CreatePool) -> None:
        self.detach()
        with one_rank_at_a_time(self._config.worker.rendezvous, self._config.worker.start_seconds_max):
            self.pool = create_pool(self._layout(order), order.blocks, self._incarnation(order))
        send_descriptor(self._link, self.pool.announcement(), self.pool.fd)
        self._attached()

    def attach(self, ready: PoolReady, fd: int) -> None:
        self.detach()
        self.pool = attach_pool(fd, ready)
        self._attached()
        self._control.send(PoolAttached(ready.incarnation))

    def _attached(self) -> None:
        """Create the host tier and open storage: the first pool defines the layout of blocks."""
        assert self.pool is not None
        if self._messenger is not None:
            self._messenger.attach(self.pool)
        if self._transfer is not None:
            self._transfer.attach(self.pool)
        elif self._preparing is None:
            if self._config.tiers:
                self._open_storage(self.pool.layout)
            self._preparing = asyncio.create_task(self._prepare(self.pool.layout))
            self._preparing.add_done_callback(self._prepared)

    def detach(self) -> None:
        """Unmap the pool: no copy from or to it may follow."""
        if self._transfer is not None:
            self._transfer.detach()
        if self._messenger is not None:
            self._messenger.detach()
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def _incarnation(self, order: CreatePool) -> PoolIncarnation | None:
        return of_rank(order.incarnation, self._config.worker.rank) if order.incarnation else None

    def _layout(self, order: CreatePool) -> KVLayout:
        if order.layout:
            return KVLayout.decode(order.layout)
        from baton.worker.build import layout_of  # this reads the model's files, but not its weights

        return layout_of(self._config.worker)

    # Lower tiers

    def _open_storage(self, layout: KVLayout) -> None:
        url = self._config.tiers.kv_storage
        if url:
            self._storage = open_backend(
                url,
                LayoutName(
                    fingerprint=layout.fingerprint(),
                    block_bytes=layout.block_bytes,
                    block_tokens=layout.block_size,
                    rank=self._config.worker.rank,
                ),
            )

    async def _prepare(self, layout: KVLayout) -> None:
        """Create the host tier. A thread reserves the memory: gigabytes of it take seconds."""
        if not self._config.tiers:
            return  # the service is used for hand-offs only
        blocks = self._config.tiers.host_blocks(layout.block_bytes * self._config.worker.ranks)  # each rank has its part
        host = self._host
        self._kept = host is not None and host.layout.fingerprint() == layout.fingerprint() and host.blocks == blocks
        if not self._kept:
            host = await asyncio.to_thread(self._make_host_pool, layout, blocks)
            ready = HostPoolReady(layout.fingerprint(), host.incarnation, host.blocks)
            send_descriptor(self._link, ready, host.fd)
        assert host is not None
        self._host = host
        self._transfer = Transfer(host, self._storage, self._report)
        if self.pool is not None:
            self._transfer.attach(self.pool)

    def _make_host_pool(self, layout: KVLayout, blocks: int) -> KVPool:
        with one_rank_at_a_time(self._config.worker.rendezvous, self._config.worker.start_seconds_max):
            return self._checked_host_pool(layout, blocks)

    def _checked_host_pool(self, layout: KVLayout, blocks: int) -> KVPool:
        needed, free = blocks * layout.block_bytes / GIB, main_memory().free_bytes / GIB
        if needed > free:
            own = self._config.tiers.kv_host_gib
            what = f"kv_host_gib is {own:g}" if own else f"kv_storage passes blocks through {needed:.2f} GiB"
            raise InvalidConfig(
                f"{what}, and {free:.2f} GiB of memory are free beside model and KV pool: "
                + ("lower it, or kv_memory_gib" if own else "lower kv_memory_gib")
            )
        return KVPool.create(layout, blocks, "baton-host")

    def _prepared(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._fail(error)
            return
        pool = self.pool.incarnation if self.pool is not None else PoolIncarnation(0)
        blocks = self._transfer.host.blocks if self._transfer is not None else 0
        scheme = self._config.tiers.kv_storage.partition(":")[0]
        peer = self._messenger.address if self._messenger is not None else ""
        wants_tokens = self._storage is not None and self._storage.wants_tokens
        self._control.send(CacheHello(pool, blocks, self._kept, scheme, peer, wants_tokens))

    def _taken(self, work: Future[None] | asyncio.Task[None]) -> None:
        """End the process if the work has failed: errors of storage are in its result, so any other error is a bug. Called on
        any thread."""
        if not work.cancelled() and (error := work.exception()) is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    def _report(self, result: MoveResult | StorageAnswer) -> None:
        """Send a message from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self._send, result)

    def _send(self, result: MoveResult | StorageAnswer) -> None:
        if self._loop.time() >= self._counters_due:
            self._send_counters()
        elif self._counters_timer is None:  # delayed, so that the last result of a series is counted too
            self._counters_timer = self._loop.call_at(self._counters_due, self._send_counters)
        self._control.send(result)

    def _send_counters(self) -> None:
        if self._counters_timer is not None:
            self._counters_timer.cancel()
            self._counters_timer = None
        self._counters_due = self._loop.time() + COUNTERS_SECONDS
        storage = {} if self._storage is None else self._storage.counters()
        if (messenger := self._messenger) is None:
            self._control.send(CacheStats(storage, loop_lag_microseconds=self._lag.microseconds))
        else:
            pulls = messenger.pulls
            counts = (pulls.outcomes, pulls.nbytes, pulls.microseconds, messenger.readers())
            self._control.send(CacheStats(storage, *counts, loop_lag_microseconds=self._lag.microseconds))

    async def _read_descriptors(self) -> None:
        while (received := await receive_descriptor(self._link)) is not None:
            message, fd = received
            if type(message) is PoolReady:
                self.attach(message, fd)
            elif type(message) is ReadersSocket and self._tcp is not None:
                self._tcp.address = message.address
                self._tcp.listen(socket.socket(fileno=fd))
            elif type(message) is HostPoolReady and self._host is None:
                self._host = KVPool.attach(fd, PoolReady(message.fingerprint, message.incarnation, message.blocks))
            else:
                os.close(fd)
                if type(message) is not HostPoolReady:
                    raise PeerError(f"a {type(message).__name__} came with a descriptor")


async def serve(config: CacheConfig, sockets: dict[str, socket.socket], process: type[CacheProcess]) -> None:
    control = await Channel.open(sockets[CONTROL])
    sockets[DESCRIPTORS].setblocking(False)
    try:
        await process(config, control, sockets[DESCRIPTORS]).run()
    except (EngineError, OSError) as error:
        control.send(StartFailed(str(error) or type(error).__name__))
        await control.finish()
        sys.exit(1)


def main(process: type[CacheProcess] = CacheProcess) -> None:
    config, sockets = begin_child(CacheConfig)
    use_only(config.worker.gpu_index)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    configure("cache", config.log_level, config.log_format)
    asyncio.run(serve(config, sockets, process))
