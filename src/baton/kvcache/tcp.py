"""The transport between machines: the peer sends blocks over TCP, after both processes have proved that they know the cluster's
secret.

open    connect, prove, name the pool (tcp_server.py is the other side), verify
read    one request for everything; pieces arrive in order, in a thread (tcp_reading.py)
lost    the connection ended: the peer died or has another pool

An aborted read ends the connection: its remaining bytes could not be distinguished from the answer to the next request.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

from baton.addresses import parse_address
from baton.config import TransferDigest, WireConfig
from baton.errors import InvalidConfig, PeerUnreadable, ProtocolError
from baton.kvcache.digests import IN_EVERY_BUILD, KEYED, ranked, wants_keyed
from baton.kvcache.socket_threads import SocketThreads, shut_down
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.tcp_reading import Reading
from baton.kvcache.tcp_server import TcpServer
from baton.kvcache.tcp_session import TcpSession, piece_blocks
from baton.kvcache.transport import PeerPool, Read
from baton.kvpool.base import Pool
from baton.kvpool.block_bytes import BlockBytes, block_bytes
from baton.kvpool.copies import CopySpan
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PoolReady, ReadPool, ReadRefused
from baton.protocol.versions import CAPABILITIES
from baton.trust.credentials import Credentials
from baton.trust.dialling import connected

SCHEME: Final = "tcp"
"""Prefix of addresses: tcp://HOST:PORT."""
PIECES: Final = "pieces"
"""Name of a peer's capability (protocol/versions.py): a piece may have several runs."""


class Tcp:
    """A Transport (transport.py) over TCP. Without an address it only reads; with one it serves once it gets the socket that
    listens there."""

    def __init__(
        self,
        credentials: Credentials,
        address: str = "",
        wire: WireConfig | None = None,
        *,
        name: str = "",
        digest: TransferDigest = "auto",
    ) -> None:
        """`name`: of our instance. `digest`: algorithm for blocks that we read."""
        self._credentials = credentials
        self._name = name
        self._digest = digest
        self._wire = wire or WireConfig()
        self._threads = SocketThreads(self._wire.peers_max)
        self.address = address
        self._server: TcpServer | None = None
        self._pool: Pool | None = None
        self._bytes: BlockBytes | None = None

    @property
    def readers(self) -> Counter[str]:
        return Counter() if self._server is None else self._server.counts

    def listen(self, listener: socket.socket) -> None:
        if self._server is not None:
            self._server.close()
        self._server = TcpServer(listener, self._credentials, self._wire, self._name)
        if self._pool is not None:
            self._server.serve(self._pool)

    def attach(self, pool: Pool) -> None:
        self._pool = pool
        self._bytes = block_bytes(pool, piece_blocks(pool.layout.block_bytes))
        if self._server is not None:
            self._server.serve(pool)

    def detach(self) -> None:
        """Detach the pool. Reads in progress end, and write nothing more."""
        self._threads.stop()
        if self._bytes is not None:
            self._bytes.close()
        self._pool = self._bytes = None
        if self._server is not None:
            self._server.withdraw()

    def close(self) -> None:
        self.detach()
        self._threads.close()
        if self._server is not None:
            self._server.close()

    def bytes_of(self, pool: Pool) -> BlockBytes | None:
        """Memory of these blocks. None: that pool is not attached any more."""
        return self._bytes if pool is self._pool else None

    async def open(self, address: str, pool: PoolIncarnation, fingerprint: bytes, on_lost: Callable[[], None]) -> PeerPool:
        """Connect, authenticate, and verify that the peer serves this pool. Raises PeerUnreadable."""
        sock: socket.socket | None = None
        try:
            sock = await connected(parse_address(address))
            session = await TcpSession.as_reader(sock, self._credentials)
            digests = ranked() if wants_keyed(self._digest, session.stream) else ()
            keyed = next((name for name in digests if name in IN_EVERY_BUILD), "")
            await session.send(ReadPool(pool, fingerprint, CAPABILITIES, self._name, keyed, digests))
            answer = await session.receive()
            if isinstance(answer, ReadRefused):
                raise PeerUnreadable(answer.reason)
            if not isinstance(answer, PoolReady) or (answer.incarnation, answer.fingerprint) != (pool, fingerprint):
                raise PeerUnreadable("this is another KV pool than the one that was asked for")
            if keyed:
                self._use_keyed(session, answer.keyed or keyed, answer)
            names = (answer.name, *session.stream.names)
            if why := self._credentials.revoked(names):
                raise PeerUnreadable(f"the peer must not be read: {why}")
        except BaseException as error:
            if sock is not None:
                sock.close()
            if isinstance(error, (OSError, ProtocolError, InvalidConfig)):
                why = str(error) or type(error).__name__
                raise PeerUnreadable(f"the peer's KV pool cannot be read over the network: {why}", "unreachable") from None
            raise
        return RemotePool(session, answer, self._threads, self.bytes_of, on_lost, lambda: self._credentials.revoked(names))

    def _use_keyed(self, session: TcpSession, algorithm: str, answer: PoolReady) -> None:
        if KEYED in answer.capabilities:
            session.use_keyed_digests(algorithm)
        elif self._digest == "keyed":
            raise PeerUnreadable("the peer is too old for keyed digests (transfer_digest): update it")


class RemotePool:
    """A PeerPool (transport.py)."""

    scheme = SCHEME

    def __init__(
        self,
        session: TcpSession,
        ready: PoolReady,
        threads: SocketThreads,
        bytes_of: Callable[[Pool], BlockBytes | None],
        on_lost: Callable[[], None],
        revoked: Callable[[], str],
    ) -> None:
        """`revoked`: the reason why the peer must not be read any more, or empty."""
        self.blocks = ready.blocks
        self.fingerprint = ready.fingerprint
        self._joins_runs = PIECES in ready.capabilities
        self._session = session
        self._threads = threads
        self._bytes_of = bytes_of
        self._on_lost = on_lost
        self._revoked = revoked
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        "Lock by which reads take turns, since they share one connection."
        self._over = self._closed = False
        self._loop.add_reader(session.sock, self._ended)

    async def read(self, runs: Sequence[CopySpan], into: Pool, deadline: Deadline, may_go_on: Callable[[], bool]) -> Read:
        """Read blocks into our pool. Returns the number of leading complete blocks, fewer than asked for at the deadline.
        Raises PeerUnreadable if the peer is lost."""
        reading: Reading | None = None
        begun = perf_counter()
        try:
            async with asyncio.timeout(deadline.left()), self._turn:
                if self._over:
                    raise PeerUnreadable("the peer was lost", "lost")
                begun, target = perf_counter(), self._bytes_of(into)
                if target is not None:
                    reading = self._reading(runs, into, target, may_go_on)
                    await self._run(reading)
        except TimeoutError:
            pass
        except (OSError, ProtocolError) as error:
            if may_go_on():  # else `detach` has ended the connection
                why = str(error) or type(error).__name__
                raise PeerUnreadable(f"the peer was lost while it was read: {why}", "lost") from None
        finally:
            if self._closed and not self._turn.locked():
                self._session.sock.close()
        return Read(0 if reading is None else reading.whole, perf_counter() - begun)

    def _reading(self, runs: Sequence[CopySpan], into: Pool, target: BlockBytes, may_go_on: Callable[[], bool]) -> Reading:
        size, joins = into.layout.block_bytes, self._joins_runs
        return Reading(self._session, runs, target, may_go_on, self._revoked, block_bytes=size, joins_runs=joins)

    async def _run(self, reading: Reading) -> None:
        self._loop.remove_reader(self._session.sock)
        whole = False
        try:
            whole = await self._threads.run(self._session.sock, reading.run)
        finally:
            if not whole:
                self._ended()
            elif not self._over:
                self._loop.add_reader(self._session.sock, self._ended)

    def _ended(self) -> None:
        """Record the end of the connection, or a protocol error: the peer sends nothing unasked."""
        if not self._over:
            self._over = True
            self._loop.remove_reader(self._session.sock)
            self._on_lost()

    def close(self) -> None:
        """Close. A running read fails, and closes the socket itself."""
        if self._closed:
            return
        self._closed = True
        if self._turn.locked():
            self._over = True
            shut_down(self._session.sock)
        else:
            if not self._over:
                self._over = True
                self._loop.remove_reader(self._session.sock)
            self._session.sock.close()
