"""The open pools of other instances: each opened once, and closed when it is no longer useful.

    requested          opened, by one handshake however many pulls wait for it
    peer lost          closed: a dead peer's memory is freed
    another pool       of the same address was opened: the old one is closed
    not used           for a while: closed
    too many           the least recently used one is closed

Everything here runs on the loop. Reads under way may continue on a closed pool: its transport tracks them. Of several addresses
the first one that can be opened is used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from baton.config import WireConfig
from baton.errors import PeerUnreadable
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.transport import PeerPool, Transport
from baton.protocol.ids import PoolIncarnation
from baton.repeats import Repeats, printable

logger = logging.getLogger("baton.cache")

PeerKey = tuple[str, PoolIncarnation]
"""Key of an open pool: address and incarnation."""


class _Peer:
    __slots__ = ("idle", "opening", "pool")

    def __init__(self, opening: asyncio.Task[PeerPool]) -> None:
        self.opening = opening
        self.pool: PeerPool | None = None
        self.idle: asyncio.TimerHandle | None = None


class Peers:
    def __init__(self, transports: Mapping[str, Transport], wire: WireConfig | None = None) -> None:
        self._transports = transports
        self._wire = wire or WireConfig()
        self._repeats = Repeats()
        self._loop = asyncio.get_running_loop()
        self._peers: dict[PeerKey, _Peer] = {}
        "Open pools, ordered by last use."

    def __len__(self) -> int:
        return len(self._peers)

    async def opened(self, key: PeerKey, fingerprint: bytes, deadline: Deadline) -> PeerPool:
        """Return the open pool. Raises PeerUnreadable with the reason. The caller must read at once: the pool may be closed
        after any wait."""
        peer = self._peers.pop(key, None)
        if peer is None:
            self._make_room()
            peer = _Peer(asyncio.create_task(self._open(key, fingerprint)))
            peer.opening.add_done_callback(lambda task: self._on_opened(key, task))
        self._peers[key] = peer
        if peer.pool is None:
            await asyncio.wait([peer.opening], timeout=deadline.left())
            if not peer.opening.done():
                raise PeerUnreadable("the peer does not answer in time", "late")
            peer.opening.result()
        if peer.pool is None or self._peers.get(key) is not peer:
            raise PeerUnreadable("the peer was lost at once", "lost")
        self._used(key, peer)
        return peer.pool

    async def _open(self, key: PeerKey, fingerprint: bytes) -> PeerPool:
        """Open the pool at the first of its addresses that can be opened. Raises PeerUnreadable if none can."""
        addresses, pool = key
        task = asyncio.current_task()
        failed = [PeerUnreadable("the peer's address is of a kind that we do not have", "unreachable")]
        seconds = self._wire.peer_open_seconds
        for address in addresses.split():
            scheme = address.partition(":")[0]
            transport = self._transports.get(scheme)
            if transport is None:
                continue
            try:
                async with asyncio.timeout(seconds):
                    opened = await transport.open(address, pool, fingerprint, lambda: self._on_lost(key, task))
                instead = f"; a better address was not opened: {failed[-1]}" if failed[1:] else ""
                logger.info("the KV pool of another instance is read at %s%s", printable(address), printable(instead))
                return opened
            except PeerUnreadable as error:
                failed.append(PeerUnreadable(str(error), error.outcome, scheme))
            except TimeoutError:
                failed.append(PeerUnreadable(f"the peer does not answer within {seconds:g} s", "late", scheme))
        raise failed[-1]

    def _on_opened(self, key: PeerKey, task: asyncio.Task[PeerPool]) -> None:
        peer = self._peers.get(key)
        if task.cancelled() or task.exception() is not None:
            if peer is not None and peer.opening is task:
                del self._peers[key]
        elif peer is None or peer.opening is not task:
            task.result().close()  # no pull has read from it
        else:
            peer.pool = task.result()
            self._used(key, peer)
            for other in [other for other in self._peers if other[0] == key[0] and other != key]:
                if self._peers[other].pool is not None:
                    self.close(other)

    def _on_lost(self, key: PeerKey, opening: asyncio.Task[Any] | None) -> None:
        peer = self._peers.get(key)
        if peer is not None and peer.opening is opening:  # otherwise it was closed, and is open anew
            self.close(key)

    def _used(self, key: PeerKey, peer: _Peer) -> None:
        if peer.idle is not None:
            peer.idle.cancel()
        peer.idle = self._loop.call_later(self._wire.peer_idle_seconds, self.close, key)

    def _make_room(self) -> None:
        most = self._wire.peers_max
        if len(self._peers) >= most:
            oldest = next((key for key, peer in self._peers.items() if peer.pool is not None), None)
            if oldest is None:
                raise PeerUnreadable(f"{most} peers are being opened already", "late")
            if times := self._repeats.due("crowded", self._loop.time()):
                text = "%d KV pools of other instances are open (peers_max): the one used longest ago is closed (%d times)"
                logger.warning(text, most, times)
            self.close(oldest)

    def close(self, key: PeerKey) -> None:
        """Close a pool. The next pull opens it anew."""
        peer = self._peers.pop(key, None)
        if peer is None:
            return
        if peer.idle is not None:
            peer.idle.cancel()
        if peer.pool is not None:
            peer.pool.close()

    def close_all(self) -> None:
        """Close all pools, and cancel those being opened."""
        for key, peer in list(self._peers.items()):
            peer.opening.cancel()
            self.close(key)
