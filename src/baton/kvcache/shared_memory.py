"""The transport between instances of one machine: the peer's pool is mapped read-only, and read like our own memory. A pool on
a GPU, too, if both instances use the same one.

open    connect to the peer's socket, name the pool (pool_server.py is the other side), get a descriptor, verify, map
read    one copy per run, in a separate thread: a pull neither waits behind copies of the tiers nor delays them
lost    the connection ended: the peer died or has another pool. A mapped pool can still be read until it is closed: the
        memory lives as long as any process maps it, and its size is sealed, so a copy never fails midway
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Final

from baton.config import WireConfig
from baton.errors import DeviceError, PeerUnreadable, ProtocolError
from baton.kvcache.pool_server import PACKET_BYTES_MAX, PoolServer, user_of
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.transport import PeerPool, Read
from baton.kvpool.base import Pool
from baton.kvpool.copies import CopySpan, copy_runs
from baton.kvpool.open import attach_pool
from baton.protocol.codec import decode, encode
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PoolReady, ReadPool, ReadRefused

SCHEME: Final = "unix"
"""Prefix of addresses: `unix:` and the path of a socket, in a private directory that exists as long as its server."""


class SharedMemory:
    """A Transport (transport.py) through mapped memory. Without an address it only reads."""

    def __init__(self, address: str = "", wire: WireConfig | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._copier = ThreadPoolExecutor(1, "baton-pull")
        self.address = address
        self._server = PoolServer(Path(address.removeprefix(f"{SCHEME}:")), wire) if address else None

    @property
    def readers(self) -> Counter[str]:
        return Counter() if self._server is None else self._server.counts

    def attach(self, pool: Pool) -> None:
        if self._server is not None:
            self._server.serve(pool)

    def detach(self) -> None:
        self._copier.submit(_nothing).result()  # the present copy stops at its next run, later ones do not begin
        if self._server is not None:
            self._server.withdraw()

    def close(self) -> None:
        self._copier.shutdown(cancel_futures=True)
        if self._server is not None:
            self._server.close()

    async def open(self, address: str, pool: PoolIncarnation, fingerprint: bytes, on_lost: Callable[[], None]) -> PeerPool:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.setblocking(False)
            await self._loop.sock_connect(sock, address.removeprefix(f"{SCHEME}:"))
            if user_of(sock) != os.getuid():
                raise PeerUnreadable("the KV pool is another user's")
            await self._loop.sock_sendall(sock, encode(ReadPool(pool, fingerprint)))
            mapped = _map(*await self._answer(sock), pool, fingerprint)
        except (OSError, DeviceError, ProtocolError, ValueError) as error:
            sock.close()
            why = str(error) or type(error).__name__
            raise PeerUnreadable(f"the peer's KV pool cannot be opened: {why}", "unreachable") from None
        except BaseException:
            sock.close()
            raise
        return MappedPool(mapped, sock, self._copier, on_lost)

    async def _answer(self, sock: socket.socket) -> tuple[bytes, list[int]]:
        readable = asyncio.Event()
        self._loop.add_reader(sock, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(sock)
        content, fds, _, _ = socket.recv_fds(sock, PACKET_BYTES_MAX, 1)
        return content, fds


def _map(content: bytes, fds: list[int], pool: PoolIncarnation, fingerprint: bytes) -> Pool:
    """Verify and map the peer's pool. The answer may be wrong, or come from another program."""
    try:
        if not content:
            raise PeerUnreadable("the peer has hung up", "unreachable")
        answer = decode(content)
        if isinstance(answer, ReadRefused):
            raise PeerUnreadable(answer.reason)
        if not isinstance(answer, PoolReady) or len(fds) != 1:
            raise ProtocolError(f"the peer answered with a {type(answer).__name__} and {len(fds)} descriptors")
        if (answer.incarnation, answer.fingerprint) != (pool, fingerprint):
            raise PeerUnreadable("this is another KV pool than the one that was asked for")
        os.set_inheritable(fds[0], False)
        return attach_pool(fds[0], answer, read_only=True)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


class MappedPool:
    """A PeerPool (transport.py)."""

    scheme = SCHEME

    def __init__(self, pool: Pool, sock: socket.socket, copier: ThreadPoolExecutor, on_lost: Callable[[], None]) -> None:
        self._pool = pool
        self._sock = sock
        self._copier = copier
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self.blocks = pool.blocks
        self.fingerprint = pool.layout.fingerprint()
        self._loop.add_reader(sock, self._ended)

    def _ended(self) -> None:
        """Record the end of the connection, or a protocol error: the peer sends nothing after its answer."""
        self._loop.remove_reader(self._sock)
        self._on_lost()

    async def read(self, runs: Sequence[CopySpan], into: Pool, deadline: Deadline, may_go_on: Callable[[], bool]) -> Read:
        def copy() -> Read:
            begun = perf_counter()
            return Read(copy_runs(self._pool, into, runs, in_time), perf_counter() - begun)

        def in_time() -> bool:
            return may_go_on() and not deadline.passed()

        return await asyncio.wrap_future(self._copier.submit(copy))

    def close(self) -> None:
        """Close the connection. The pool is unmapped when all copies submitted so far have ended."""
        self._loop.remove_reader(self._sock)
        self._sock.close()
        try:
            self._copier.submit(_nothing).add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._pool.close))
        except RuntimeError:  # the threads were shut down: there are no copies
            self._pool.close()


def _nothing() -> None:
    return None
