"""One connection between the messengers of two machines, after both have proved that they know the cluster's secret (trust/).

    sealed message   length, counter, MAC, message            both ways
    bytes            raw, right behind a message              from the peer to the reader
                     with their number and digest

With certificates all of it is inside TLS (trust/stream.py). Otherwise nothing is encrypted. kvcache/digests.py has the digests.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import sys
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
from baton.trust.stream import Stream, open_stream

MESSAGE_BYTES_MAX: Final = 256 * 1024
RUNS_MAX: Final = 8192
"""Runs of one request. As numbers they fit into a message."""
PIECE_BYTES: Final = 1 << 20
"""Bytes copied, hashed and sent at a time, or one block if that is more: a millisecond of the loop."""
ALIVE_SECONDS: Final = 30
"""After this long without traffic the kernel probes the other machine, three times."""


def piece_blocks(block_bytes: int) -> int:
    return max(1, PIECE_BYTES // block_bytes)


class TcpSession:
    """One task at a time reads, and one writes. Failures raise ProtocolError or OSError."""

    def __init__(
        self, stream: Stream, sealer: Sealer, unsealer: Unsealer, version: int = VERSIONS.newest, bytes_key: bytes = b""
    ) -> None:
        """`bytes_key`: the key of the side that sends blocks."""
        self.stream = stream
        self.sock = stream.sock
        self._version = version
        self._sealer = sealer
        self._unsealer = unsealer
        self._bytes_key = bytes_key
        self._digest: Digest = checksum
        self._buffer = bytearray()
        "One buffer for all pieces: fresh memory for each would take longer than to fill it."

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
        """Called on both sides before the first bytes. Raises ProtocolError."""
        self._digest = KeyedDigest(self._bytes_key, algorithm)

    async def send(self, message: Message) -> None:
        await self.stream.send(self._sealer.seal([encode(message, self._version)]))

    async def receive(self) -> Message:
        while True:
            frame = bytearray(SEAL_BYTES)
            await self._fill(memoryview(frame))
            frame += bytes(content_bytes(frame, MESSAGE_BYTES_MAX))
            await self._fill(memoryview(frame)[SEAL_BYTES:])
            messages = list(self._unsealer.messages(memoryview(frame)))
            if len(messages) > 1:
                raise LinkFailed("malformed", f"{len(messages)} messages came where one was due")
            if messages:  # otherwise the frame held only kinds that this build does not know
                return messages[0]

    def buffer(self, nbytes: int) -> memoryview:
        """A buffer to fill and send, before the next one is requested."""
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]

    async def send_bytes(self, content: memoryview, first: int = 0) -> None:
        """`first`: the block with which the bytes begin."""
        await asyncio.sleep(0)  # on a network that never blocks, other tasks would get no turn
        await self.send(BlocksFollow(len(content), self._digest(content, first)))
        await self.stream.send(content)

    async def receive_bytes(self, nbytes: int, first: int = 0) -> memoryview:
        """Receive exactly `nbytes`, which begin with this block, verified; valid until the next call."""
        await asyncio.sleep(0)  # as above
        follows = await self.receive()
        if isinstance(follows, ReadRefused):
            raise ProtocolError(follows.reason)
        if not isinstance(follows, BlocksFollow) or follows.nbytes != nbytes:
            raise ProtocolError("the peer sends something else than was asked for")
        content = self.buffer(nbytes)
        await self._fill(content)
        if not hmac.compare_digest(self._digest(content, first), follows.digest):
            raise ProtocolError("blocks were damaged on their way")
        return content

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
