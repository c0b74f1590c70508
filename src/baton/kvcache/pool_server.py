"""Lets other instances of this machine read our KV pool: sends a read-only descriptor.

    reader  connects, sends ReadPool(incarnation, layout)      within a few seconds, or it is closed
    we      answer PoolReady with the descriptor               or ReadRefused, and close
            keep the connection: its end signals               we died, or the pool was replaced
            the reader to unmap the pool

At the limit of config/wire.py, a new reader replaces one that has sent nothing yet, or else the oldest, which connects again
when it needs to.

The socket lies in a directory that only our user can enter, and the kernel reports the user of the connected process. A
malformed message costs its sender the connection and nothing else. Messages are packets (SOCK_SEQPACKET): each arrives complete
or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections import Counter
from pathlib import Path
from typing import Final

from baton.config import WireConfig
from baton.errors import ProtocolError
from baton.kvpool.base import Pool
from baton.protocol.codec import decode, encode
from baton.protocol.pool import PoolReady, ReadPool, ReadRefused
from baton.repeats import Repeats, printable
from baton.trust.acceptor import Acceptor

logger = logging.getLogger("baton.cache")

PACKET_BYTES_MAX: Final = 4096
BACKLOG: Final = 64


class PoolServer:
    """Serves our pool to readers, on one loop. Listens from its creation; while no pool is served every reader is refused."""

    def __init__(self, path: Path, wire: WireConfig | None = None) -> None:
        self._wire = wire or WireConfig()
        self._loop = asyncio.get_running_loop()
        self._ready: PoolReady | None = None
        self._fd = -1
        self._served: set[asyncio.Task[None]] = set()
        "Readers that have a descriptor. All others have sent nothing yet."
        self._repeats = Repeats()
        self.counts: Counter[str] = Counter()
        path.unlink(missing_ok=True)  # left by a killed predecessor
        self._path = path
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(str(path))
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._readers: Acceptor[None] = Acceptor(listener, self)

    def serve(self, pool: Pool) -> None:
        self.withdraw()
        self._fd, self._ready = pool.reading_descriptor(), pool.announcement()

    def withdraw(self) -> None:
        """Close the readers' connections, so that they unmap the pool."""
        for task in self._readers.open:
            self._readers.disconnect(task)
        if self._fd >= 0:
            os.close(self._fd)
        self._ready, self._fd = None, -1

    def close(self) -> None:
        self.withdraw()
        self._readers.close()
        with contextlib.suppress(OSError):  # the engine may have removed the socket first
            self._path.unlink(missing_ok=True)

    def on_accept_failed(self, error: OSError) -> None:
        logger.warning("a reader of the KV pool cannot be accepted: %s", error)

    def make_room(self, living: list[asyncio.Task[None]]) -> None:
        if len(living) < self._wire.readers_max:
            return
        self.counts["evicted"] += 1
        if times := self._repeats.due("evicted", self._loop.time()):
            text = "%d instances of this machine read our KV pool (readers_max): the oldest connection is closed (%d times)"
            logger.warning(text, self._wire.readers_max, times)
        self._readers.disconnect(min(living, key=lambda task: task in self._served))

    def on_ended(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        sock.close()
        self._served.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counts["failed"] += 1
            if self._repeats.due(type(error), self._loop.time()):
                why = printable(str(error) or type(error).__name__)
                logger.warning("a reader of the KV pool is closed: %s (%d so far)", why, self.counts["failed"])

    async def serve_connection(self, sock: socket.socket, place: object) -> None:
        if user_of(sock) != os.getuid():
            raise ProtocolError("it is another user's")
        async with asyncio.timeout(self._wire.reader_handshake_seconds):
            asked = decode(await self._loop.sock_recv(sock, PACKET_BYTES_MAX))
        if not isinstance(asked, ReadPool):
            raise ProtocolError(f"it began with a {type(asked).__name__}")
        if reason := self._refusal(asked):
            self.counts["refused"] += 1
            sock.send(encode(ReadRefused(reason)))
            return
        assert self._ready is not None
        socket.send_fds(sock, [encode(self._ready)], [self._fd])
        self.counts["opened"] += 1
        if (task := asyncio.current_task()) is not None:
            self._served.add(task)
        if await self._loop.sock_recv(sock, 1):  # empty when the reader closes
            raise ProtocolError("it sent more than was asked of it")

    def _refusal(self, asked: ReadPool) -> str:
        if self._ready is None:
            return "there is no KV pool"
        if asked.pool != self._ready.incarnation:
            return "that KV pool is not there any more"
        return "" if asked.fingerprint == self._ready.fingerprint else "the KV pool has another layout"


def user_of(sock: socket.socket) -> int:
    """User id of the process at the other end, recorded by the kernel when it connected or listened."""
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)
