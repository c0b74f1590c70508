"""The transport between machines: the peer sends blocks over TCP, after both processes have proved that they know the cluster's
secret.

open    connect, prove, name the pool (tcp_server.py is the other side), verify
read    one request for everything; pieces arrive in order, and each is verified before it is written
lost    the connection ended: the peer died or has another pool

Everything runs on the loop, one piece at a time (tcp_session.py): a stalled peer delays no other. An aborted read ends the
connection: its remaining bytes could not be distinguished from the answer to the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from time import perf_counter
from typing import Final

from baton.addresses import parse_address
from baton.config import TransferDigest, WireConfig
from baton.errors import InvalidConfig, PeerUnreadable, ProtocolError
from baton.kvcache.digests import KEYED, fastest, wants_keyed
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.tcp_server import TcpServer
from baton.kvcache.tcp_session import RUNS_MAX, TcpSession, piece_blocks
from baton.kvcache.transport import PeerPool, Read
from baton.kvpool.base import Pool
from baton.kvpool.block_bytes import BlockBytes, block_bytes
from baton.kvpool.copies import CopySpan
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PoolReady, ReadBlocks, ReadPool, ReadRefused
from baton.protocol.versions import CAPABILITIES
from baton.trust.credentials import Credentials
from baton.trust.dialling import connected

SCHEME: Final = "tcp"
"""An address is tcp://HOST:PORT."""


class Tcp:
    """A Transport (transport.py). Without an address it only reads; with one it serves once it gets the socket that listens
    there."""

    def __init__(
        self,
        credentials: Credentials,
        address: str = "",
        wire: WireConfig | None = None,
        *,
        name: str = "",
        digest: TransferDigest = "auto",
    ) -> None:
        """`name`: of our instance. `digest`: of the blocks that we read."""
        self._credentials = credentials
        self._name = name
        self._digest = digest
        self._wire = wire
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
        """Detach the pool. Reads under way write nothing more: they check before every piece."""
        if self._bytes is not None:
            self._bytes.close()
        self._pool = self._bytes = None
        if self._server is not None:
            self._server.withdraw()

    def close(self) -> None:
        self.detach()
        if self._server is not None:
            self._server.close()

    def write(self, pool: Pool, first: int, content: memoryview) -> bool:
        """Write blocks. False: that pool is not attached any more."""
        if pool is not self._pool or self._bytes is None:
            return False
        self._bytes.write(first, content)
        return True

    async def open(self, address: str, pool: PoolIncarnation, fingerprint: bytes, on_lost: Callable[[], None]) -> PeerPool:
        sock: socket.socket | None = None
        try:
            sock = await connected(parse_address(address))
            session = await TcpSession.as_reader(sock, self._credentials)
            keyed = fastest() if wants_keyed(self._digest, session.stream) else ""
            await session.send(ReadPool(pool, fingerprint, CAPABILITIES, self._name, keyed))
            answer = await session.receive()
            if isinstance(answer, ReadRefused):
                raise PeerUnreadable(answer.reason)
            if not isinstance(answer, PoolReady) or (answer.incarnation, answer.fingerprint) != (pool, fingerprint):
                raise PeerUnreadable("this is another KV pool than the one that was asked for")
            if keyed:
                self._use_keyed(session, keyed, answer)
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
        return RemotePool(session, answer, self.write, on_lost, lambda: self._credentials.revoked(names))

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
        write: Callable[[Pool, int, memoryview], bool],
        on_lost: Callable[[], None],
        revoked: Callable[[], str] = lambda: "",
    ) -> None:
        """`revoked`: why the peer must not be read any more, or empty."""
        self.blocks = ready.blocks
        self.fingerprint = ready.fingerprint
        self._session = session
        self._write = write
        self._on_lost = on_lost
        self._revoked = revoked
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        "Reads take turns: they share one connection anyway."
        self._over = self._closed = False
        self._loop.add_reader(session.sock, self._ended)

    async def read(self, runs: Sequence[CopySpan], into: Pool, deadline: Deadline, may_go_on: Callable[[], bool]) -> Read:
        whole, begun = 0, perf_counter()
        try:
            async with asyncio.timeout(deadline.left()), self._turn:
                if self._over:
                    raise PeerUnreadable("the peer was lost", "lost")
                begun = perf_counter()
                self._loop.remove_reader(self._session.sock)
                try:
                    async with contextlib.aclosing(self._pieces(runs, into.layout.block_bytes)) as pieces:
                        async for piece, content in pieces:
                            if why := self._revoked():
                                raise PeerUnreadable(f"the peer must not be read any more: {why}")
                            if not may_go_on() or not self._write(into, piece.target, content):
                                self._ended()
                                break
                            whole += piece.blocks
                except BaseException:
                    self._ended()
                    raise
                if not self._over:
                    self._loop.add_reader(self._session.sock, self._ended)
        except TimeoutError:
            pass
        except (OSError, ProtocolError) as error:
            why = str(error) or type(error).__name__
            raise PeerUnreadable(f"the peer was lost while it was read: {why}", "lost") from None
        finally:
            if self._closed and not self._turn.locked():
                self._session.sock.close()
        return Read(whole, perf_counter() - begun)

    async def _pieces(self, runs: Sequence[CopySpan], block_bytes: int) -> AsyncGenerator[tuple[CopySpan, memoryview], None]:
        pieces = _pieces(runs, piece_blocks(block_bytes))
        for begin in range(0, len(pieces), RUNS_MAX):
            asked = pieces[begin : begin + RUNS_MAX]
            await self._session.send(ReadBlocks(tuple((piece.source, piece.blocks) for piece in asked)))
            for piece in asked:
                yield piece, await self._session.receive_bytes(piece.blocks * block_bytes, piece.source)

    def _ended(self) -> None:
        """The peer sends nothing unasked, so this is the end of the connection, or a protocol error."""
        if not self._over:
            self._over = True
            self._loop.remove_reader(self._session.sock)
            self._on_lost()

    def close(self) -> None:
        """Close. A read under way fails, and closes the socket itself."""
        if self._closed:
            return
        self._closed = True
        if self._turn.locked():
            self._over = True
            with contextlib.suppress(OSError):  # it has ended already
                self._session.sock.shutdown(socket.SHUT_RDWR)
        else:
            if not self._over:
                self._over = True
                self._loop.remove_reader(self._session.sock)
            self._session.sock.close()


def _pieces(runs: Sequence[CopySpan], blocks_max: int) -> list[CopySpan]:
    return [
        CopySpan(run.source + at, run.target + at, min(blocks_max, run.blocks - at))
        for run in runs
        for at in range(0, run.blocks, blocks_max)
    ]
