"""One connection between the messengers of two machines, after both have proved that they know the cluster's secret (trust/).

    sealed message   length, counter, MAC, message            both ways
    piece            raw bytes, right behind a message        from the peer to the reader
                     with their number and digest

With certificates all of it is inside TLS (trust/stream.py). Otherwise nothing is encrypted. kvcache/digests.py has the digests.
Messages pass on the loop; requests for blocks and their pieces in a thread (socket_threads.py).
"""

from __future__ import annotations

import hmac
import socket
import sys
from collections.abc import Sequence
from typing import Final

from baton.errors import LinkFailed, ProtocolError
from baton.kvcache.digests import Digest, KeyedDigest, checksum
from baton.protocol.codec import FROM_PEER, FROM_READER, Message, encode
from baton.protocol.pool import BlocksFollow, ReadRefused
from baton.protocol.versions import VERSIONS
from baton.trust.credentials import Credentials
from baton.trust.handshake import READ
from baton.trust.seal import SEAL_BYTES, Sealer, Unsealer, content_bytes
from baton.trust.session import prove_as_dialler, prove_as_listener
from baton.trust.stream import SocketStream, open_stream

MESSAGE_BYTES_MAX: Final = 256 * 1024
RUNS_MAX: Final = 8192
"""Maximum of runs per request. As numbers they fit into a message."""
PIECE_BYTES: Final = 1 << 20
"""Number of bytes with one digest, or one block if that is more. Small: the first piece is hashed before anything is sent, the
last one after everything has arrived."""
ALIVE_SECONDS: Final = 30
"""Seconds without traffic after which the kernel probes the other machine, three times."""


def piece_blocks(block_bytes: int) -> int:
    return max(1, PIECE_BYTES // block_bytes)


class TcpSession:
    """A session, used by one task or thread at a time. Failures raise ProtocolError or OSError."""

    def __init__(
        self, stream: SocketStream, sealer: Sealer, unsealer: Unsealer, version: int = VERSIONS.newest, bytes_key: bytes = b""
    ) -> None:
        """`bytes_key`: the key of the side that sends blocks."""
        self.stream = stream
        self.sock = stream.sock
        self._version = version
        self._sealer = sealer
        self._unsealer = unsealer
        self._bytes_key = bytes_key
        self._digest: Digest = checksum
        self._spares = [bytearray(), bytearray()]
        "Memory for all pieces: to allocate it for each would take longer than to fill it."

    @classmethod
    async def as_peer(cls, sock: socket.socket, credentials: Credentials) -> TcpSession:
        _prepare(sock)
        stream = await open_stream(sock, credentials, READ, listens=True)
        (ours, theirs), version = await prove_as_listener(stream, credentials.secrets(), READ)
        return cls(stream, Sealer(ours), Unsealer(theirs, FROM_READER), version, ours)

    @classmethod
    async def as_reader(cls, sock: socket.socket, credentials: Credentials) -> TcpSession:
        _prepare(sock)
        stream = await open_stream(sock, credentials, READ, listens=False)
        (theirs, ours), version = await prove_as_dialler(stream, credentials.secrets(), READ)
        return cls(stream, Sealer(ours), Unsealer(theirs, FROM_PEER), version, theirs)

    def use_keyed_digests(self, algorithm: str) -> None:
        """Key the digests. Called on both sides before the first bytes. Raises ProtocolError."""
        self._digest = KeyedDigest(self._bytes_key, algorithm)

    async def send(self, message: Message) -> None:
        await self.stream.send(self._sealer.seal([encode(message, self._version)]))

    async def receive(self) -> Message:
        while True:
            frame = bytearray(SEAL_BYTES)
            await self._fill(memoryview(frame))
            frame += bytes(content_bytes(frame, MESSAGE_BYTES_MAX))
            await self._fill(memoryview(frame)[SEAL_BYTES:])
            if (message := self._unsealed(frame)) is not None:
                return message

    def _unsealed(self, frame: bytearray) -> Message | None:
        """The message in a frame. None: the frame holds only kinds that this build does not know."""
        messages = list(self._unsealer.messages(memoryview(frame)))
        if len(messages) > 1:
            raise LinkFailed("malformed", f"{len(messages)} messages came where one was due")
        return messages[0] if messages else None

    def spare(self, nbytes: int) -> memoryview:
        """Memory for one piece, until the call after the next one."""
        self._spares.reverse()
        if len(self._spares[0]) < nbytes:
            self._spares[0] = bytearray(nbytes)
        return memoryview(self._spares[0])[:nbytes]

    # Called in a thread

    def digest(self, content: Sequence[memoryview], first: int) -> bytes:
        """Digest of the next piece, which begins with this block. Both sides call it in the order of the pieces."""
        running = self._digest(first)
        for view in content:
            running.update(view)
        return running.digest()

    def write_message(self, message: Message, *, more: bool = False) -> None:
        self.stream.write(self._sealer.seal([encode(message, self._version)]), more=more)

    def write_piece(self, content: Sequence[memoryview], digest: bytes) -> None:
        self.write_message(BlocksFollow(sum(map(len, content)), digest), more=True)
        for view in content:
            self.stream.write(view)

    def read_piece(self, into: Sequence[memoryview]) -> bytes:
        """Receive a piece. Returns the digest that it should have. Raises ProtocolError; `into` may be filled then."""
        follows = self._read_message()
        if isinstance(follows, ReadRefused):
            raise ProtocolError(follows.reason)
        if not isinstance(follows, BlocksFollow) or follows.nbytes != sum(map(len, into)):
            raise ProtocolError("the peer sends something else than was asked for")
        for view in into:
            self.stream.fill(view)
        return follows.digest

    def verify(self, content: Sequence[memoryview], first: int, digest: bytes) -> None:
        """Compare the digest of a received piece (`digest`). Raises ProtocolError."""
        if not hmac.compare_digest(self.digest(content, first), digest):
            raise ProtocolError("blocks were damaged on their way")

    def _read_message(self) -> Message:
        while True:
            frame = bytearray(SEAL_BYTES)
            self.stream.fill(memoryview(frame))
            frame += bytes(content_bytes(frame, MESSAGE_BYTES_MAX))
            self.stream.fill(memoryview(frame)[SEAL_BYTES:])
            if (message := self._unsealed(frame)) is not None:
                return message

    async def _fill(self, view: memoryview) -> None:
        while view:
            count = await self.stream.receive_into(view)
            if not count:
                raise LinkFailed("closed", "the peer has hung up")
            view = view[count:]


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, ALIVE_SECONDS), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
