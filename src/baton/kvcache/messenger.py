"""The messenger: brings blocks from the KV pools of other instances into ours (`pull`), and lets others read ours.

    loop      take(move) .. open the peer's pool, if it is not open .. report(result)
    thread                                    copy, run by run            ^
                                              '---------------------------'

It has a thread of its own: a pull neither waits behind copies of the tiers (transfer.py) nor holds them up. A peer that does
not answer holds up nobody, because opening is done on the loop. Deadline and detach are looked at between two runs, and a run
is short.

Whatever goes wrong is in the result: nobody's request fails because of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Final

from baton.errors import DeviceError, PeerUnreadable
from baton.kvcache.peers import Peers
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.transport import PeerPool, Transport, runs_of
from baton.kvpool.base import Pool
from baton.protocol.moves import BlockMove, MoveResult

RUN_BYTES: Final = 16 << 20
"""The most that is copied without a look at the deadline: some milliseconds."""


class Messenger:
    """On one loop. `transports`: by scheme; each is closed with it."""

    def __init__(self, transports: Mapping[str, Transport], report: Callable[[MoveResult], None]) -> None:
        self._transports = transports
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._device: Pool | None = None
        self._fingerprint = b""
        self._copier = ThreadPoolExecutor(1, "baton-pull")
        self._peers = Peers(transports, self._after_copies)
        self._pulls: dict[asyncio.Task[None], None] = {}

    @property
    def address(self) -> str:
        """Where others may read our pool."""
        return next((transport.address for transport in self._transports.values() if transport.address), "")

    def attach(self, pool: Pool) -> None:
        self._device, self._fingerprint = pool, pool.layout.fingerprint()
        for transport in self._transports.values():
            transport.attach(pool)

    def detach(self) -> None:
        """When this returns nothing is copied to the pool any more, and no other may begin to read it."""
        self._device = None  # the copy under way stops at its next run, those behind it do not begin
        self._copier.submit(_nothing).result()
        for transport in self._transports.values():
            transport.detach()

    def take(self, move: BlockMove) -> asyncio.Task[None]:
        task = asyncio.create_task(self._pull(move, Deadline.after(move.seconds_max)))
        self._pulls[task] = None
        task.add_done_callback(lambda task: self._pulls.pop(task, None))
        return task

    def close(self) -> None:
        """Nothing is told of what was under way."""
        for task in self._pulls:
            task.cancel()
        self._device = None
        self._copier.shutdown(cancel_futures=True)
        self._peers.close_all()
        for transport in self._transports.values():
            transport.close()

    async def _pull(self, move: BlockMove, deadline: Deadline) -> None:
        try:
            device = self._device
            if device is None or device.incarnation != move.pool:
                raise PeerUnreadable("another pool is attached")
            peer = await self._peers.opened((move.peer, move.peer_pool), self._fingerprint, deadline)
            copied = self._copier.submit(self._copy, move, peer, deadline)
        except PeerUnreadable as error:
            self._report(MoveResult(move.id, 0, error=str(error)))
            return
        self._report(await asyncio.wrap_future(copied))

    # In the thread

    def _copy(self, move: BlockMove, peer: PeerPool, deadline: Deadline) -> MoveResult:
        device, begun, moved = self._device, perf_counter(), 0
        try:
            if device is None or device.incarnation != move.pool:
                raise PeerUnreadable("another pool is attached")
            _verify(move, peer, device)
            runs = list(runs_of(move.peer_blocks, move.device, max(1, RUN_BYTES // device.layout.block_bytes)))
            moved = peer.read(runs, device, lambda: self._device is device and not deadline.passed())
            if moved == len(move.device):
                error = None
            else:
                error = "it took too long" if self._device is device else "the pool was detached"
        except (DeviceError, PeerUnreadable) as failed:
            error = str(failed)
        return MoveResult(move.id, moved, perf_counter() - begun, error)

    def _after_copies(self, act: Callable[[], None]) -> None:
        """On the loop, when all copies are over that were told until now."""

        def tell(_: Future[None]) -> None:
            self._loop.call_soon_threadsafe(act)

        try:
            self._copier.submit(_nothing).add_done_callback(tell)
        except RuntimeError:  # it was shut down: there are no copies
            act()


def _nothing() -> None:
    return None


def _verify(move: BlockMove, peer: PeerPool, device: Pool) -> None:
    """A peer's block ids come from another instance: one that is not there must not become a read of something else."""
    if peer.fingerprint != device.layout.fingerprint():
        raise PeerUnreadable("the peer's KV pool has another layout")
    if len(move.peer_blocks) != len(move.device):
        raise PeerUnreadable(f"{len(move.peer_blocks)} blocks of the peer are to go into {len(move.device)} of ours")
    for ids, blocks in ((move.peer_blocks, peer.blocks), (move.device, device.blocks)):
        if ids and (min(ids) < 0 or max(ids) >= blocks):
            raise PeerUnreadable(f"there is no such block in a pool of {blocks}")
