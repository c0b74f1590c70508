"""Framed messages over a stream socket between two processes of one instance.

The socket is one half of a socketpair that the parent made and the child inherited: nobody else can reach it, it has no name
to collide or to be left behind, and the other side's death is an end of file at once, not a time-out.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final

from baton.errors import ProtocolError
from baton.protocol.codec import HEADER_BYTES, Message, body_length, decode, encode

BACKLOG_BYTES_MAX: Final = 256 * 1024 * 1024
"""A peer that lets this much pile up is not reading any more."""

LAST_WORDS_SECONDS: Final = 2.0
"""How long the end of a process waits for the other side to take what was said last."""


class Channel:
    """The asyncio end. `send` never waits; what is not read by the other side piles up, within a bound."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> Channel:
        sock.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def send(self, message: Message) -> None:
        """To a peer that is gone: nothing happens, `receive` tells of the end."""
        if self._writer.is_closing():
            return
        self._writer.write(encode(message))
        if self._writer.transport.get_write_buffer_size() > BACKLOG_BYTES_MAX:
            self._writer.transport.abort()

    async def receive(self) -> Message | None:
        """The next message, None at the end. Bytes that are not ours end it too, with an error."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            return decode(header + await self._reader.readexactly(body_length(header)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except ProtocolError:
            self.close()
            raise

    def close(self) -> None:
        self._writer.close()

    async def finish(self) -> None:
        """Close when the other side has taken everything, or does not take it any more."""
        self.close()
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(self._writer.wait_closed(), LAST_WORDS_SECONDS)


class BlockingChannel:
    """The plain end, for a process that does one thing at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._file = sock.makefile("rb", buffering=1 << 16)

    def send(self, message: Message) -> None:
        self._socket.sendall(encode(message))

    def receive(self) -> Message | None:
        header = self._file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            return None
        length = body_length(header)
        body = self._file.read(length)
        return decode(header + body) if len(body) == length else None
