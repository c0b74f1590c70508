"""Framed messages over a stream socket between two processes of one instance.

The socket is one half of a socketpair that the parent created and the child inherited: no other process can reach it, it has no
name to collide or to be left behind, and the other side's death is an end of file at once, not a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, cast

from baton.errors import PeerError, ProtocolError, Unavailable
from baton.protocol.codec import Message, encode
from baton.protocol.frames import FrameBuffer

OFFER_BYTES_MAX: Final = 64 * 1024 * 1024
"""Unread bytes above which `offer` refuses. With the largest frame on top they stay below BACKLOG_BYTES_MAX."""

BACKLOG_BYTES_MAX: Final = 256 * 1024 * 1024
"""Unread bytes above which a peer counts as not reading."""

UNREAD_SECONDS_MAX: Final = 120.0
"""Seconds after which a peer that reads not one byte counts as not reading. Longer than any step."""

LAST_WORDS_SECONDS: Final = 2.0
"""Seconds that the end of a process waits until the other side has read the last messages."""

INBOX_MAX: Final = 256
"""Maximum of messages that wait for `receive`; beyond it the socket is not read."""


class Channel:
    """The asyncio end. `send` never waits; unread messages queue up, within a bound.

    Malformed bytes of the peer raise PeerError and end the channel. A message of ours that cannot be sent is an error for its
    sender, and the channel stays open.

    Messages are received one by one with `receive`, or passed to a function with `listen`: it is called directly by the loop,
    with no task or queue between the socket and it, because tokens pass here.
    """

    def __init__(self, frames: FrameProtocol) -> None:
        self._frames = frames

    @classmethod
    async def open(cls, sock: socket.socket) -> Channel:
        sock.setblocking(False)
        channel = Channel(FrameProtocol(FrameBuffer()))
        await asyncio.get_running_loop().create_unix_connection(lambda: channel._frames, sock=sock)
        return channel

    @property
    def backlog(self) -> int:
        """Bytes sent that the kernel has not accepted yet: the peer is behind."""
        return self._frames.backlog

    def send(self, message: Message) -> None:
        """Send a message. To a closed peer nothing is sent; `receive` reports the end. Raises MessageTooLarge; then nothing was
        sent."""
        self._frames.write(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded message: a message to several channels is encoded once."""
        self._frames.write(frame)

    def offer(self, message: Message) -> None:
        """Send a message that can be refused: raises Unavailable if the peer is far behind."""
        if self.backlog > OFFER_BYTES_MAX:
            raise Unavailable("the engine is too far behind to take more requests; try again later")
        self.send(message)

    async def receive(self) -> Message | None:
        """The next message, None at the end. Malformed bytes end it too, with an error."""
        frames = self._frames
        while not frames.inbox:
            if frames.ended.done():
                frames.ended.result()
                return None
            frames.news.clear()
            await frames.news.wait()
        message = frames.inbox.popleft()
        if len(frames.inbox) == INBOX_MAX - 1 and not frames.transport.is_closing():
            frames.transport.resume_reading()
        return message

    async def listen(self, take: Callable[[Message], None]) -> None:
        """Pass every message to `take` as it arrives, until the end. An error of `take` ends it, and is raised here."""
        frames = self._frames
        while frames.inbox:
            take(frames.inbox.popleft())
        if not frames.transport.is_closing():
            frames.transport.resume_reading()
        frames.take = take
        try:
            await asyncio.shield(frames.ended)
        finally:
            frames.take = frames.queue  # the listener has stopped

    def close(self) -> None:
        self._frames.close()

    async def finish(self) -> None:
        """Close after the other side has read everything, or LAST_WORDS_SECONDS have passed."""
        self.close()
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(asyncio.shield(self._frames.lost), LAST_WORDS_SECONDS)


class FrameProtocol(asyncio.BufferedProtocol):
    """Reads into one reused buffer; each wake-up handles every complete frame in it.

    runtime/wire/link.py subclasses it for sealed frames.
    """

    transport: asyncio.Transport

    def __init__(self, buffer: FrameBuffer) -> None:
        loop = asyncio.get_running_loop()
        self.inbox: deque[Message] = deque()
        self.take: Callable[[Message], None] = self.queue
        self.news = asyncio.Event()
        self.ended: asyncio.Future[None] = loop.create_future()
        "Completes when no message follows; with the error, if there was one."
        self.ended.add_done_callback(lambda ended: ended.exception())  # retrieve the error, even if it is never awaited
        self.lost: asyncio.Future[None] = loop.create_future()
        "Whether the socket is closed: written bytes have been sent, or never will be."
        self._buffer = buffer
        self._written = 0
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self.ended.done():
            return
        messages = self._buffer.filled(nbytes)
        while (message := self._next(messages)) is not None and not self.ended.done():
            try:
                self.take(message)
            except Exception as error:
                self._end(error)

    def _next(self, messages: Iterator[Message]) -> Message | None:
        try:
            return next(messages, None)
        except ProtocolError as error:
            self._end(error if isinstance(error, PeerError) else PeerError(str(error)))
            self.transport.close()
            return None

    @property
    def backlog(self) -> int:
        return self.transport.get_write_buffer_size()

    def close(self) -> None:
        self.transport.close()

    def write(self, frame: bytes) -> None:
        if self.transport.is_closing():
            return
        self._written += len(frame)
        self.transport.write(frame)
        unread = self.transport.get_write_buffer_size()
        if unread > self.backlog_bytes_max():
            self._drop_unread(unread)
        elif unread and self._unread_timer is None:
            self._watch_unread()

    def _watch_unread(self) -> None:
        """Check repeatedly until everything is read; abort when nothing was read in between."""
        taken = self._written - self.transport.get_write_buffer_size()

        def check() -> None:
            self._unread_timer = None
            unread = self.transport.get_write_buffer_size()
            if unread and not self.transport.is_closing():
                self._watch_unread() if self._written - unread > taken else self._drop_unread(unread)

        self._unread_timer = asyncio.get_running_loop().call_later(UNREAD_SECONDS_MAX, check)

    def backlog_bytes_max(self) -> int:
        return BACKLOG_BYTES_MAX

    def _drop_unread(self, unread: int) -> None:
        """Abort: the peer has stopped reading."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self._end(None)
        if not self.lost.done():
            self.lost.set_result(None)

    def queue(self, message: Message) -> None:
        """Append the message to the inbox. A full inbox stops reading."""
        self.inbox.append(message)
        self.news.set()
        if len(self.inbox) == INBOX_MAX:
            self.transport.pause_reading()

    def _end(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error) if error is not None else self.ended.set_result(None)
        self.news.set()


class BlockingChannel:
    """The blocking end, for a process that does one thing at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._buffer = FrameBuffer()
        self._inbox: deque[Message] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_message(self) -> bool:
        """Whether a message is buffered: then receive() need not read the socket."""
        return bool(self._inbox)

    def send(self, message: Message) -> None:
        self._socket.sendall(encode(message))

    def receive(self) -> Message | None:
        while not self._inbox:
            count = self._socket.recv_into(self._buffer.room())
            if not count:
                return None
            self._inbox.extend(self._buffer.filled(count))
        return self._inbox.popleft()
