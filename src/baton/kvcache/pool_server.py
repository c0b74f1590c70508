"""Lets other instances of this machine read our KV pool: hands out a descriptor that cannot be written through.

    reader  connects, says ReadPool(incarnation, layout)       within a few seconds, or it is closed
    we      answer PoolReady with the descriptor               or ReadRefused, and close
            keep the connection: its end tells the reader      we died, or the pool is another one
            that it is to unmap the pool

When as many read as config/wire.py allows, one more takes the place of one that has said nothing yet, or else of the one that
came first: that one connects again when it needs to.

The socket lies in a directory that only our user can enter, and the kernel says whose process has connected. What anybody
sends costs the sender its connection and nothing else. Messages are packets (SOCK_SEQPACKET): one is whole, or it is none.
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

logger = logging.getLogger("baton.cache")

PACKET_BYTES_MAX: Final = 4096
BACKLOG: Final = 64
PAUSE_SECONDS: Final = 0.5
"""After an accept that failed, as without descriptors: else the loop would do nothing else."""


class PoolServer:
    """On one loop. Listens from the beginning; while no pool is served everybody is refused."""

    def __init__(self, path: Path, wire: WireConfig | None = None) -> None:
        self._wire = wire or WireConfig()
        self._loop = asyncio.get_running_loop()
        self._ready: PoolReady | None = None
        self._fd = -1
        self._readers: dict[asyncio.Task[None], socket.socket] = {}
        self._served: set[asyncio.Task[None]] = set()
        "Those that have a descriptor. All others have said nothing yet."
        self._repeats = Repeats()
        self.counts: Counter[str] = Counter()
        path.unlink(missing_ok=True)  # of a predecessor that was killed
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.setblocking(False)
            self._listener.bind(str(path))
            self._listener.listen(BACKLOG)
        except BaseException:
            self._listener.close()
            raise
        self._accepting = asyncio.create_task(self._accept())

    def serve(self, pool: Pool) -> None:
        self.withdraw()
        self._fd, self._ready = pool.reading_descriptor(), pool.announcement()

    def withdraw(self) -> None:
        """Readers see the end of their connections, and unmap it."""
        for task in self._readers:
            self._close(task)
        if self._fd >= 0:
            os.close(self._fd)
        self._ready, self._fd = None, -1

    def _close(self, task: asyncio.Task[None]) -> None:
        with contextlib.suppress(OSError):  # it is over already
            self._readers[task].shutdown(socket.SHUT_RDWR)
        task.cancel()

    def close(self) -> None:
        self._accepting.cancel()
        self._listener.close()
        self.withdraw()
        with contextlib.suppress(OSError):  # the engine may have been quicker
            self._path.unlink(missing_ok=True)

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                logger.warning("a reader of the KV pool cannot be accepted: %s", error)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self._make_room()
            task = asyncio.create_task(self._attend(sock))
            self._readers[task] = sock
            task.add_done_callback(self._ended)
            await asyncio.sleep(0)  # one a turn

    def _make_room(self) -> None:
        there = [task for task in self._readers if not task.cancelling()]
        if len(there) < self._wire.readers_max:
            return
        self.counts["evicted"] += 1
        if times := self._repeats.due("evicted", self._loop.time()):
            text = "%d instances of this machine read our KV pool (readers_max): the oldest connection is closed (%d times)"
            logger.warning(text, self._wire.readers_max, times)
        self._close(min(there, key=lambda task: task in self._served))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Closed here and not in the task: one that is cancelled before it began has run nothing."""
        self._readers.pop(task).close()
        self._served.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counts["failed"] += 1
            if self._repeats.due(type(error), self._loop.time()):
                why = printable(str(error) or type(error).__name__)
                logger.warning("a reader of the KV pool is closed: %s (%d so far)", why, self.counts["failed"])

    async def _attend(self, sock: socket.socket) -> None:
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
        if await self._loop.sock_recv(sock, 1):  # nothing, at its end
            raise ProtocolError("it said more than was asked of it")

    def _refusal(self, asked: ReadPool) -> str:
        if self._ready is None:
            return "there is no KV pool"
        if asked.pool != self._ready.incarnation:
            return "that KV pool is not there any more"
        return "" if asked.fingerprint == self._ready.fingerprint else "the KV pool has another layout"


def user_of(sock: socket.socket) -> int:
    """Whose process is at the other end, as the kernel noted it when it connected or listened."""
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)
