"""A connected socket as a stream of bytes, with TLS or without. The caller sets deadlines and closes the socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final

from baton.errors import LinkFailed
from baton.trust.credentials import Credentials
from baton.trust.handshake import Purpose
from baton.trust.tls import BOTH, TlsLayer

RECORD_BYTES: Final = 256 * 1024
"""Bytes received, or encrypted and sent, at a time."""
HANDSHAKE_BYTES: Final = 16 * 1024
"""The same before the first long read: a connection that is not authenticated yet takes little memory."""
KEY_BYTES_MAX: Final = 256 << 30
"""Bytes under one key of AES-GCM, after which a session should end (RFC 8446, 5.5: 2^24.5 records): Python cannot renew it."""


class Stream:
    """One task at a time reads, and one writes. Failures raise OSError or LinkFailed."""

    def __init__(self, sock: socket.socket, tls: TlsLayer | None = None) -> None:
        self.sock = sock
        self.tls = tls
        self._loop = asyncio.get_running_loop()
        self._records = memoryview(bytearray(HANDSHAKE_BYTES if tls is not None else 0))
        self._sent = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the other side's certificate. None without TLS."""
        return () if self.tls is None else self.tls.names

    @property
    def worn(self) -> bool:
        """The session should end soon, and its successor have another key."""
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
        """Number of bytes received. 0: the other side has closed the connection."""
        if self.tls is None:
            return await self._loop.sock_recv_into(self.sock, view)
        if len(view) > len(self._records) < RECORD_BYTES:
            self._records = memoryview(bytearray(RECORD_BYTES))
        while not (count := self.tls.read_into(view)):
            if not await self._receive_records(self.tls):
                return 0
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

    async def _receive_records(self, tls: TlsLayer) -> int:
        count = await self._loop.sock_recv_into(self.sock, self._records)
        tls.feed(self._records[:count])
        return count


async def open_stream(sock: socket.socket, credentials: Credentials, purpose: Purpose, *, listens: bool) -> Stream:
    """Begin TLS if the credentials have a certificate. Connections within a machine (unix sockets) do without. Raises
    LinkFailed."""
    stream, contexts = Stream(sock), credentials.tls()
    if contexts is not None and sock.family != socket.AF_UNIX:
        peer = purpose.dialler if listens else purpose.listener
        try:
            await stream.begin_tls(TlsLayer(contexts, listens=listens, peer=peer))
        except OSError as error:
            raise LinkFailed("closed", f"the connection was lost in the TLS handshake ({error.strerror})") from None
    return stream
