"""Splits a stream of bytes into messages. One buffer, read into and decoded in place, whatever the sizes of the reads.

|-- frame --|-- frame --|-- begun ...                room ...|
0                                     `- target of the next read
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from baton.protocol.codec import HEADER_BYTES, Message, decode_body, read_header

BUFFER_BYTES: Final = 64 * 1024
"""Bytes of the buffer, enough for one wake-up. A larger frame gets a larger buffer, until it is decoded."""


class FrameBuffer:
    __slots__ = ("_filled", "_view")

    def __init__(self) -> None:
        self._view = memoryview(bytearray(BUFFER_BYTES))
        self._filled = 0

    def room(self) -> memoryview:
        """Buffer for the next bytes; never empty."""
        return self._view[self._filled :]

    def filled(self, count: int) -> Iterator[Message]:
        """Yield the messages that are complete after `count` more bytes. The caller iterates to the end. Raises the errors of
        `decode`."""
        view, at, end, needed = self._view, 0, self._filled + count, HEADER_BYTES
        while end - at >= HEADER_BYTES:
            kind, length = read_header(view, at)
            needed = HEADER_BYTES + length
            if end - at < needed:
                break
            at += needed
            yield decode_body(kind, view[at - length : at])
            needed = HEADER_BYTES
        self._make_room(at, end, needed)

    def _make_room(self, at: int, end: int, needed: int) -> None:
        """Move the begun frame to the start of a buffer that has room for all of it."""
        old, size = self._view, max(needed, BUFFER_BYTES)
        if size != len(old):
            self._view = memoryview(bytearray(size))
        self._filled = end - at
        if at or old is not self._view:
            self._view[: end - at] = old[at:end]
