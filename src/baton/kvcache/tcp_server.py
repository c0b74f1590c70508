"""Lets instances of other machines read our KV pool: sends them the requested blocks.

    reader  proves that it knows the cluster's secret, and so do we       within a few seconds, or it is closed
            sends ReadPool(incarnation, layout)
    we      answer PoolReady                                             or ReadRefused, and close
    reader  ReadBlocks(runs), as often as it likes
    we      BlocksFollow and the bytes, for every run                    a reader that reads nothing for a while is closed

The end of the connection signals the reader that the pool must not be read any more. A connection that is not authenticated
holds a descriptor and a timer; their number is limited, and at the limit the oldest one is closed. Readers are limited, too:
one more than config/wire.py allows replaces the one that has been idle longest, which connects again when it needs to. While
all of them receive blocks the new one is refused. A malformed message costs its sender the connection and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from baton.config import WireConfig
from baton.errors import LinkFailed, ProtocolError
from baton.kvcache.digests import chosen
from baton.kvcache.socket_threads import Beside, SocketThreads, one_ahead, shut_down
from baton.kvcache.tcp_session import RUNS_MAX, TcpSession, piece_blocks
from baton.kvpool.base import Pool
from baton.kvpool.block_bytes import BlockBytes, Runs, block_bytes, release
from baton.protocol.pool import PoolReady, ReadBlocks, ReadPool, ReadRefused
from baton.protocol.versions import CAPABILITIES
from baton.repeats import Repeats, printable
from baton.trust.acceptor import Acceptor
from baton.trust.credentials import Credentials

logger = logging.getLogger("baton.cache")

LOG_SECONDS: Final = 10.0
"""Least seconds between two log lines of one kind of failure: any host that reaches the port could fill the disk."""


class _Reader:
    __slots__ = ("asked_at", "sending", "sock")

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock = sock
        self.asked_at = now
        "Time of the reader's last request, or of its connection."
        self.sending = False


class TcpServer:
    """Serves our pool over TCP, on one loop. `listener` listens already. While no pool is served every reader is refused."""

    def __init__(
        self, listener: socket.socket, credentials: Credentials, wire: WireConfig | None = None, name: str = ""
    ) -> None:
        """`name`: of our instance."""
        self._wire = wire or WireConfig()
        self._loop = asyncio.get_running_loop()
        self._threads = SocketThreads(self._wire.readers_max + 1)
        self._credentials = credentials
        self._name = name
        self._pool: Pool | None = None
        self._bytes: BlockBytes | None = None
        self._readers: dict[asyncio.Task[None], _Reader] = {}
        self._repeats = Repeats(LOG_SECONDS)
        self.counts: Counter[str] = Counter()
        self._handshakes: Acceptor[TcpSession] = Acceptor(listener, self)

    def serve(self, pool: Pool) -> None:
        self.withdraw()
        self._pool = pool
        self._bytes = block_bytes(pool, piece_blocks(pool.layout.block_bytes))

    def withdraw(self) -> None:
        """Close the readers' connections. The pool is not accessed again."""
        for task in list(self._readers):
            self._close(task)
        self._threads.stop()
        if self._bytes is not None:
            self._bytes.close()
        self._pool = self._bytes = None

    def close(self) -> None:
        self._handshakes.close()
        self.withdraw()
        self._threads.close()

    def _close(self, task: asyncio.Task[None]) -> None:
        shut_down(self._readers[task].sock)
        task.cancel()

    def on_accept_failed(self, error: OSError) -> None:
        self._note("a reader of the KV pool cannot be accepted", error)

    def make_room(self, living: list[asyncio.Task[TcpSession]]) -> None:
        if len(living) >= self._wire.reader_handshakes_max:
            self.counts["handshake_evicted"] += 1
            living[0].cancel()

    async def serve_connection(self, sock: socket.socket, place: object) -> TcpSession:
        async with asyncio.timeout(self._wire.reader_handshake_seconds):
            return await TcpSession.as_peer(sock, self._credentials)

    def on_ended(self, task: asyncio.Task[TcpSession], sock: socket.socket) -> None:
        if not self._succeeded(task):
            sock.close()
            return
        self._make_room_to_read()
        reader = _Reader(sock, self._loop.time())
        reading = asyncio.create_task(self._read(task.result(), reader))
        self._readers[reading] = reader
        reading.add_done_callback(self._ended)

    def _make_room_to_read(self) -> None:
        """Close the reader that has been idle longest, if the limit is reached; unless all are receiving blocks."""
        there = {task: reader for task, reader in self._readers.items() if not task.cancelling()}
        idle = [task for task, reader in there.items() if not reader.sending]
        if len(there) < self._wire.readers_max or not idle:
            return
        self.counts["evicted"] += 1
        if times := self._repeats.due("evicted", self._loop.time()):
            text = "%d instances read our KV pool (readers_max): the one idle longest is closed (%d times)"
            logger.warning(text, self._wire.readers_max, times)
        self._close(min(idle, key=lambda task: there[task].asked_at))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._readers.pop(task).sock.close()
        self._succeeded(task)

    def _succeeded(self, task: asyncio.Task[Any]) -> bool:
        if task.cancelled():
            return False
        error = task.exception()
        if error is not None and not (isinstance(error, LinkFailed) and error.reason == "closed"):  # the usual end of a reader
            self._note("a reader of the KV pool is closed", error)
        return error is None

    def _note(self, what: str, error: BaseException) -> None:
        self.counts["failed"] += 1
        why = str(error) or type(error).__name__
        if self._repeats.due((what, type(error)), self._loop.time()):
            logger.warning("%s: %s (%d so far)", what, printable(why), self.counts["failed"])

    async def _read(self, session: TcpSession, reader: _Reader) -> None:
        """Serve one reader: verify which pool it asks for, then send blocks until it ends, is idle for too long, or is
        revoked."""
        async with asyncio.timeout(self._wire.reader_handshake_seconds):
            asked = await session.receive()
            if not isinstance(asked, ReadPool):
                raise ProtocolError(f"it began with a {type(asked).__name__}")
            names = (asked.name, *session.stream.names)
            if reason := self._credentials.revoked(names):
                await self._end_revoked(session, reason)
            if reason := self._refusal(asked):
                self.counts["refused"] += 1
                await session.send(ReadRefused(reason))
                return
            pool = self._pool
            assert pool is not None
            keyed = chosen(asked.digests, asked.keyed)
            if keyed:
                session.use_keyed_digests(keyed)
            ready = PoolReady(asked.fingerprint, asked.pool, pool.blocks, None, CAPABILITIES, self._name, keyed)
            await session.send(ready)
            self.counts["opened"] += 1
        while not session.stream.key_is_used_up:  # otherwise the reader connects again when needed
            reader.sending = False
            async with asyncio.timeout(self._wire.reader_idle_seconds):
                wanted = await session.receive()
            if not isinstance(wanted, ReadBlocks):
                raise ProtocolError(f"it sent {type(wanted).__name__}")
            _verify(wanted, pool)
            reader.sending, reader.asked_at = True, self._loop.time()
            # The pool is still attached: withdraw cancels this task where it waits, after its thread has returned.
            assert self._bytes is not None
            if reason := await self._threads.run(session.sock, partial(self._send, session, wanted, self._bytes, names)):
                await self._end_revoked(session, reason)

    def _send(
        self, session: TcpSession, wanted: ReadBlocks, content: BlockBytes, names: tuple[str, ...], beside: Beside
    ) -> str:
        """Send all pieces in a thread, and hash the next one meanwhile. Returns early with the reason if the reader was
        revoked."""

        def load(runs: Runs) -> tuple[list[memoryview], bytes]:
            views = content.read(runs, session.spare)
            return views, session.digest(views, runs[0][0])

        loaded = one_ahead(beside, load, list(_pieces(wanted)), lambda dropped: release(dropped[0]))
        with session.stream.blocking(self._wire.reader_send_seconds), contextlib.closing(loaded):
            for views, digest in loaded:
                try:
                    if reason := self._credentials.revoked(names):
                        return reason
                    session.write_piece(views, digest)
                finally:
                    release(views)
        return ""

    async def _end_revoked(self, session: TcpSession, reason: str) -> None:
        """Raise LinkFailed, after the reader was sent the reason."""
        self.counts["refused"] += 1
        await session.send(ReadRefused(reason))
        raise LinkFailed("revoked", reason)

    def _refusal(self, asked: ReadPool) -> str:
        if sum(not task.cancelling() for task in self._readers) > self._wire.readers_max:
            return f"{self._wire.readers_max} instances are being sent blocks already (readers_max)"
        if self._pool is None:
            return "there is no KV pool"
        if asked.pool != self._pool.incarnation:
            return "that KV pool is not there any more"
        return "" if asked.fingerprint == self._pool.layout.fingerprint() else "the KV pool has another layout"


def _pieces(wanted: ReadBlocks) -> Iterator[Runs]:
    begin = 0
    for count in wanted.pieces or (1,) * len(wanted.runs):
        yield wanted.runs[begin : begin + count]
        begin += count


def _verify(wanted: ReadBlocks, pool: Pool) -> None:
    most = piece_blocks(pool.layout.block_bytes)
    if len(wanted.runs) > RUNS_MAX:
        raise ProtocolError(f"{len(wanted.runs)} runs at once; {RUNS_MAX} are allowed")
    if wanted.pieces and sum(wanted.pieces) != len(wanted.runs):
        raise ProtocolError(f"pieces of {sum(wanted.pieces)} runs; there are {len(wanted.runs)}")
    for first, blocks in wanted.runs:
        if not 1 <= blocks <= most or first < 0 or first + blocks > pool.blocks:
            raise ProtocolError(f"blocks {first} to {first + blocks - 1} of a pool of {pool.blocks}, {most} at a time")
    if any(sum(blocks for _, blocks in runs) > most for runs in _pieces(wanted)):
        raise ProtocolError(f"a piece of more than {most} blocks")
