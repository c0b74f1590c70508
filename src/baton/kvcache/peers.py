"""The pools of other instances that are open for reading: each opened once, and closed when it is no use any more.

    asked for          opened, by one handshake however many ask at once
    peer lost          closed: a dead peer's memory is given back
    another pool       of the same address was opened: the old one is closed
    not used           for a while: closed
    too many           the one used longest ago is closed

Everything here runs on the loop. A pool that is closed may still be read by what had begun to: its transport knows when it is
over. Of several addresses the first is taken that can be opened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from baton.errors import PeerUnreadable
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.transport import PeerPool, Transport
from baton.protocol.ids import PoolIncarnation

logger = logging.getLogger("baton.cache")

PEERS_MAX: Final = 32
OPEN_SECONDS: Final = 2.0
IDLE_SECONDS: Final = 60.0

PeerKey = tuple[str, PoolIncarnation]
"""Address and pool."""


class _Peer:
    __slots__ = ("idle", "opening", "pool")

    def __init__(self, opening: asyncio.Task[PeerPool]) -> None:
        self.opening = opening
        self.pool: PeerPool | None = None
        self.idle: asyncio.TimerHandle | None = None


class Peers:
    def __init__(self, transports: Mapping[str, Transport]) -> None:
        self._transports = transports
        self._loop = asyncio.get_running_loop()
        self._peers: dict[PeerKey, _Peer] = {}
        "In the order of their last use."

    def __len__(self) -> int:
        return len(self._peers)

    async def opened(self, key: PeerKey, fingerprint: bytes, deadline: Deadline) -> PeerPool:
        """PeerUnreadable: it is not, and why. To be read from at once: it may be closed after any wait."""
        peer = self._peers.pop(key, None)
        if peer is None:
            self._make_room()
            peer = _Peer(asyncio.create_task(self._open(key, fingerprint)))
            peer.opening.add_done_callback(lambda task: self._on_opened(key, task))
        self._peers[key] = peer
        if peer.pool is None:
            await asyncio.wait([peer.opening], timeout=deadline.left())
            if not peer.opening.done():
                raise PeerUnreadable("the peer does not answer in time")
            peer.opening.result()
        if peer.pool is None or self._peers.get(key) is not peer:
            raise PeerUnreadable("the peer was lost at once")
        self._used(key, peer)
        return peer.pool

    async def _open(self, key: PeerKey, fingerprint: bytes) -> PeerPool:
        addresses, pool = key
        task = asyncio.current_task()
        failed = [PeerUnreadable("the peer's address is of a kind that we do not have")]
        for address in addresses.split():
            transport = self._transports.get(address.partition(":")[0])
            if transport is None:
                continue
            try:
                async with asyncio.timeout(OPEN_SECONDS):
                    opened = await transport.open(address, pool, fingerprint, lambda: self._on_lost(key, task))
                logger.info("a peer's KV pool is read at %s", address)
                return opened
            except PeerUnreadable as error:
                failed.append(error)
            except TimeoutError:
                failed.append(PeerUnreadable(f"the peer does not answer within {OPEN_SECONDS:g} s"))
        raise failed[-1]

    def _on_opened(self, key: PeerKey, task: asyncio.Task[PeerPool]) -> None:
        peer = self._peers.get(key)
        if task.cancelled() or task.exception() is not None:
            if peer is not None and peer.opening is task:
                del self._peers[key]
        elif peer is None or peer.opening is not task:
            task.result().close()  # nobody has read from it
        else:
            peer.pool = task.result()
            self._used(key, peer)
            for other in [other for other in self._peers if other[0] == key[0] and other != key]:
                if self._peers[other].pool is not None:
                    self.close(other)

    def _on_lost(self, key: PeerKey, opening: asyncio.Task[Any] | None) -> None:
        peer = self._peers.get(key)
        if peer is not None and peer.opening is opening:  # else it was closed, and is open anew
            self.close(key)

    def _used(self, key: PeerKey, peer: _Peer) -> None:
        if peer.idle is not None:
            peer.idle.cancel()
        peer.idle = self._loop.call_later(IDLE_SECONDS, self.close, key)

    def _make_room(self) -> None:
        if len(self._peers) >= PEERS_MAX:
            oldest = next((key for key, peer in self._peers.items() if peer.pool is not None), None)
            if oldest is None:
                raise PeerUnreadable(f"{PEERS_MAX} peers are being opened already")
            self.close(oldest)

    def close(self, key: PeerKey) -> None:
        """The next one that asks opens it anew."""
        peer = self._peers.pop(key, None)
        if peer is None:
            return
        if peer.idle is not None:
            peer.idle.cancel()
        if peer.pool is not None:
            peer.pool.close()

    def close_all(self) -> None:
        """None is opened any more."""
        for key, peer in list(self._peers.items()):
            peer.opening.cancel()
            self.close(key)
