"""Lets instances of other machines read our KV pool: sends them the blocks that they ask for.

    reader  proves that it knows the cluster's secret, and so do we       within a few seconds, or it is closed
            says ReadPool(incarnation, layout)
    we      answer PoolReady                                             or ReadRefused, and close
    reader  ReadBlocks(runs), as often as it likes
    we      BlocksFollow and the bytes, for every run                    a reader that takes nothing for a while is closed

The end of the connection tells the reader that the pool is not to be read any more. Who has proved nothing holds a descriptor
and a timer; there are few such places, and when all are taken the one that has held its place longest loses it. What a reader
sends costs it its connection and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any, Final

from baton.errors import LinkFailed, ProtocolError
from baton.kvcache.tcp_session import RUNS_MAX, TcpSession, piece_blocks
from baton.kvpool.base import Pool
from baton.kvpool.block_bytes import BlockBytes, block_bytes
from baton.protocol.pool import PoolReady, ReadBlocks, ReadPool, ReadRefused
from baton.trust.secret import Secret

logger = logging.getLogger("baton.cache")

READERS_MAX: Final = 64
HANDSHAKES_MAX: Final = 32
HANDSHAKE_SECONDS: Final = 2.0
SEND_SECONDS: Final = 10.0
"""For a piece (tcp_session.py)."""
IDLE_SECONDS: Final = 120.0
"""A reader that asks for nothing for so long is closed. It closes by itself after half of that (peers.py)."""
PAUSE_SECONDS: Final = 0.5
"""After an accept that failed, as without descriptors: else the loop would do nothing else."""
LOG_SECONDS: Final = 10.0
"""Failures are logged at most this often: whoever reaches the port could fill the disk."""


class TcpServer:
    """On one loop. `listener` listens already. While no pool is served everybody is refused."""

    def __init__(self, listener: socket.socket, secret: Secret) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._secret = secret
        self._pool: Pool | None = None
        self._bytes: BlockBytes | None = None
        self._handshakes: dict[asyncio.Task[TcpSession], socket.socket] = {}
        "The oldest first."
        self._readers: dict[asyncio.Task[None], socket.socket] = {}
        self._failures = 0
        self._logged = -LOG_SECONDS
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    def serve(self, pool: Pool) -> None:
        self.withdraw()
        self._pool = pool
        self._bytes = block_bytes(pool, piece_blocks(pool.layout.block_bytes))

    def withdraw(self) -> None:
        """Readers see the end of their connections. The pool is not touched again."""
        for task, sock in self._readers.items():
            with contextlib.suppress(OSError):  # it is over already
                sock.shutdown(socket.SHUT_RDWR)
            task.cancel()
        if self._bytes is not None:
            self._bytes.close()
        self._pool = self._bytes = None

    def close(self) -> None:
        self._accepting.cancel()
        self._listener.close()
        for task in self._handshakes:
            task.cancel()
        self.withdraw()

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                self._note(error)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            under_way = [task for task in self._handshakes if not task.cancelling()]
            if len(under_way) >= HANDSHAKES_MAX:
                under_way[0].cancel()
            task = asyncio.create_task(self._prove(sock))
            self._handshakes[task] = sock
            task.add_done_callback(self._proved)

    async def _prove(self, sock: socket.socket) -> TcpSession:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            return await TcpSession.as_peer(sock, self._secret)

    def _proved(self, task: asyncio.Task[TcpSession]) -> None:
        """Sockets are closed here and not in the task: one that is cancelled before it began has run nothing."""
        sock = self._handshakes.pop(task)
        if not self._went_well(task) or len(self._readers) >= READERS_MAX:
            sock.close()
            return
        reading = asyncio.create_task(self._attend(task.result()))
        self._readers[reading] = sock
        reading.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._readers.pop(task).close()
        self._went_well(task)

    def _went_well(self, task: asyncio.Task[Any]) -> bool:
        if task.cancelled():
            return False
        error = task.exception()
        if error is not None and not (isinstance(error, LinkFailed) and error.reason == "closed"):  # the usual end
            self._note(error)
        return error is None

    def _note(self, error: BaseException) -> None:
        self._failures += 1
        if self._loop.time() >= self._logged + LOG_SECONDS:
            self._logged = self._loop.time()
            why = str(error) or type(error).__name__
            logger.info("a reader of the KV pool is closed: %s (%d so far)", why, self._failures)

    async def _attend(self, session: TcpSession) -> None:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            asked = await session.receive()
            if not isinstance(asked, ReadPool):
                raise ProtocolError(f"it began with a {type(asked).__name__}")
            if reason := self._refusal(asked):
                await session.send(ReadRefused(reason))
                return
            pool = self._pool
            assert pool is not None
            await session.send(PoolReady(asked.fingerprint, asked.pool, pool.blocks))
        while True:
            async with asyncio.timeout(IDLE_SECONDS):
                wanted = await session.receive()
            if not isinstance(wanted, ReadBlocks):
                raise ProtocolError(f"it said {type(wanted).__name__}")
            _verify(wanted, pool)
            for first, blocks in wanted.runs:
                # Whether the pool is still there need not be asked: withdraw cancels this task where it waits.
                assert self._bytes is not None
                async with asyncio.timeout(SEND_SECONDS):
                    content = session.buffer(blocks * pool.layout.block_bytes)
                    self._bytes.read(first, content)
                    await session.send_bytes(content)

    def _refusal(self, asked: ReadPool) -> str:
        if self._pool is None:
            return "there is no KV pool"
        if asked.pool != self._pool.incarnation:
            return "that KV pool is not there any more"
        return "" if asked.fingerprint == self._pool.layout.fingerprint() else "the KV pool has another layout"


def _verify(wanted: ReadBlocks, pool: Pool) -> None:
    most = piece_blocks(pool.layout.block_bytes)
    if len(wanted.runs) > RUNS_MAX:
        raise ProtocolError(f"{len(wanted.runs)} runs at once; {RUNS_MAX} are allowed")
    for first, blocks in wanted.runs:
        if not 1 <= blocks <= most or first < 0 or first + blocks > pool.blocks:
            raise ProtocolError(f"blocks {first} to {first + blocks - 1} of a pool of {pool.blocks}, {most} at a time")
