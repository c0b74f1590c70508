"""A connected socket as a stream of bytes, with TLS or without. The caller sets deadlines and closes the socket.

On the loop: `send` and `receive_into`. In a thread, for many bytes, while the loop leaves the socket alone: `blocking`, and in
it `write` and `fill`. Its end is a `shutdown` of the socket by another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator
from typing import Final

from baton.errors import LinkFailed
from baton.trust.credentials import Credentials
from baton.trust.handshake import Purpose
from baton.trust.tls import BOTH, TlsLayer

RECORD_BYTES: Final = 256 * 1024
"""Maximum of bytes received, or encrypted and sent, at a time."""
HANDSHAKE_BYTES: Final = 16 * 1024
"""Maximum of bytes before the first long read: a connection that is not authenticated yet takes little memory."""
KEY_BYTES_MAX: Final = 256 << 30
"""Bytes under one key of AES-GCM, after which a session should end (RFC 8446, 5.5: 2^24.5 records): Python cannot renew it."""


class SocketStream:
    """A stream on a socket. One task at a time reads, and one writes. Failures raise OSError or LinkFailed."""

    def __init__(self, sock: socket.socket, tls: TlsLayer | None = None) -> None:
        self.sock = sock
        self.tls = tls
        self._loop = asyncio.get_running_loop()
        self._records = memoryview(bytearray(HANDSHAKE_BYTES if tls is not None else 0))
        self._sent = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the other side's certificate. Without TLS there are none."""
        return () if self.tls is None else self.tls.names

    @property
    def key_is_used_up(self) -> bool:
        """Whether the key has sealed KEY_BYTES_MAX: the session should end soon, because its successor has another key."""
        return self._sent >= KEY_BYTES_MAX

    async def send(self, content: bytes | memoryview) -> None:
        if self.tls is None:
            await self._loop.sock_sendall(self.sock, content)
            return
        view = memoryview(content)
        self._sent += len(view)
        for at in range(0, len(view), RECORD_BYTES):
            await self._loop.sock_sendall(self.sock, self.tls.encrypt(view[at : at + RECORD_BYTES]))

    async def receive_into(self, view: memoryview) -> int:
        """Receive bytes and return their number. 0: the other side has closed the connection."""
        if self.tls is None:
            return await self._loop.sock_recv_into(self.sock, view)
        self._grow_records(view)
        while not (count := self.tls.read_into(view)):
            if not await self._receive_records(self.tls):
                return 0
        return count

    @contextlib.contextmanager
    def blocking(self, seconds: float | None = None) -> Iterator[None]:
        """Make the socket blocking. `seconds`: within which each `write` must end, else it raises TimeoutError."""
        self.sock.settimeout(seconds)
        try:
            yield
        finally:
            self.sock.setblocking(False)

    def write(self, content: bytes | memoryview, *, more: bool = False) -> None:
        """Write these bytes. `more`: more follows at once, and may share a packet with this."""
        flags = socket.MSG_MORE if more and sys.platform == "linux" else 0
        if self.tls is None:
            self.sock.sendall(content, flags)
            return
        with memoryview(content) as view:  # released also when sending fails: the error's traceback would keep a pool mapped
            self._sent += len(view)
            for at in range(0, len(view), RECORD_BYTES):
                with view[at : at + RECORD_BYTES] as part:
                    self.sock.sendall(self.tls.encrypt(part), flags)

    def fill(self, view: memoryview) -> None:
        """Receive as many bytes as `view` has. Raises LinkFailed if the other side has closed the connection."""
        done = 0
        while done < len(view):
            with view[done:] as rest:
                count = self._fill_some(rest)
            if not count:
                raise LinkFailed("closed", "the peer has hung up")
            done += count

    def _fill_some(self, view: memoryview) -> int:
        if self.tls is None:
            return self.sock.recv_into(view, 0, socket.MSG_WAITALL)
        self._grow_records(view)
        while not (count := self.tls.read_into(view)):
            if not (received := self.sock.recv_into(self._records)):
                return 0
            self.tls.feed(self._records[:received])
        return count

    async def begin_tls(self, tls: TlsLayer) -> None:
        """Complete the handshake. Raises LinkFailed, after the other side was sent the reason."""
        self._records = memoryview(bytearray(HANDSHAKE_BYTES))
        try:
            while not tls.handshake():
                await self._loop.sock_sendall(self.sock, tls.pending())
                if not await self._receive_records(tls):
                    raise LinkFailed("tls", f"the {tls.peer} closed the connection during the TLS handshake: {BOTH}")
        except LinkFailed:
            with contextlib.suppress(OSError):
                await self._loop.sock_sendall(self.sock, tls.pending())
            raise
        await self._loop.sock_sendall(self.sock, tls.pending())
        self.tls = tls

    def _grow_records(self, view: memoryview) -> None:
        if len(view) > len(self._records) < RECORD_BYTES:
            self._records = memoryview(bytearray(RECORD_BYTES))

    async def _receive_records(self, tls: TlsLayer) -> int:
        count = await self._loop.sock_recv_into(self.sock, self._records)
        tls.feed(self._records[:count])
        return count


async def open_stream(sock: socket.socket, credentials: Credentials, purpose: Purpose, *, listens: bool) -> SocketStream:
    """Begin TLS if the credentials have a certificate. Connections within a machine (unix sockets) do without. Raises
    LinkFailed."""
    stream, contexts = SocketStream(sock), credentials.tls()
    if contexts is not None and sock.family != socket.AF_UNIX:
        peer = purpose.dialler if listens else purpose.listener
        try:
            await stream.begin_tls(TlsLayer(contexts, listens=listens, peer=peer))
        except OSError as error:
            raise LinkFailed("closed", f"the connection was lost in the TLS handshake ({error.strerror})") from None
    return stream
