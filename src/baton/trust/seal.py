"""Sealed frames: all messages of one turn of the loop, with a counter and a MAC.

    0            4             12              44
    | length u32 | counter u64 | HMAC-SHA256   | frames of protocol/codec.py, `length` bytes together

The MAC covers length, counter and content, with the key of this direction of this session. The counter begins at 0 and grows by
one: a repeated, reordered or missing frame is detected. The content is not read before the MAC is verified. It is not
encrypted.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from baton.errors import LinkFailed, ProtocolError
from baton.protocol.codec import FRAME_BYTES_MAX, HEADER_BYTES, Message, decode_body, is_known, name_of, read_header
from baton.protocol.frames import FrameBuffer

_PREFIX: Final = struct.Struct("!IQ")
_MAC_BYTES: Final = 32
SEAL_BYTES: Final = _PREFIX.size + _MAC_BYTES
CONTENT_BYTES_MAX: Final = HEADER_BYTES + FRAME_BYTES_MAX


class Sealer:
    __slots__ = ("_counter", "_mac")

    def __init__(self, key: bytes) -> None:
        self._mac = hmac.new(key, digestmod="sha256")
        self._counter = 0

    def seal(self, frames: Sequence[bytes]) -> bytes:
        content = frames[0] if len(frames) == 1 else b"".join(frames)
        prefix = _PREFIX.pack(len(content), self._counter)
        self._counter += 1
        mac = self._mac.copy()  # the key is in it already: a third less time than hmac.digest
        mac.update(prefix)
        mac.update(content)
        return b"".join((prefix, mac.digest(), content))


class Unsealer:
    """Opens sealed frames. A faulty frame raises LinkFailed and ends the session. A message of a kind that this build does not
    know is skipped: a newer peer may send it, and does not depend on it."""

    __slots__ = ("_allowed", "_counter", "_mac", "on_unknown")

    def __init__(self, key: bytes, allowed: frozenset[int]) -> None:
        self._mac = hmac.new(key, digestmod="sha256")
        self._counter = 0
        self._allowed = allowed
        self.on_unknown: Callable[[int], None] = lambda kind: None
        "Callback with the kind of every message that is skipped."

    def messages(self, frame: memoryview) -> Iterator[Message]:
        """The messages of one complete frame."""
        self._check(frame)
        yield from self._decoded(frame[SEAL_BYTES:])

    def _check(self, frame: memoryview) -> None:
        _, counter = _PREFIX.unpack_from(frame)
        mac = self._mac.copy()
        mac.update(frame[: _PREFIX.size])
        mac.update(frame[SEAL_BYTES:])
        if not hmac.compare_digest(mac.digest(), frame[_PREFIX.size : SEAL_BYTES]):
            raise LinkFailed("mac", f"frame {self._counter} of the session was changed on its way, or is not the peer's")
        if counter != self._counter:
            raise LinkFailed("replay", f"frame {counter} of the session came where {self._counter} was due")
        self._counter += 1

    def _decoded(self, content: memoryview) -> Iterator[Message]:
        """Yield the messages of an opened frame. Raises LinkFailed for a message that this side may not receive, or a malformed
        one."""
        at = 0
        while at < len(content):
            try:
                kind, length = read_header(content, at)
                if kind not in self._allowed and is_known(kind):
                    raise LinkFailed("kind", f"a {name_of(kind)}, which this side of a session never sends")
                at += HEADER_BYTES + length
                if at > len(content):
                    raise LinkFailed("malformed", "a message is longer than its sealed frame")
                if kind not in self._allowed:
                    self.on_unknown(kind)
                    continue
                message = decode_body(kind, content[at - length : at])
            except LinkFailed:
                raise
            except ProtocolError as error:
                raise LinkFailed("malformed", str(error)) from None
            yield message


def content_bytes(seal: memoryview | bytearray, most: int) -> int:
    """Number of bytes after the seal (the first SEAL_BYTES of a frame)."""
    length, _ = _PREFIX.unpack_from(seal)
    if length > most:
        raise LinkFailed("too_large", f"a sealed frame of {length} bytes; {most} are allowed")
    return int(length)


class SealedBuffer(FrameBuffer):
    """FrameBuffer for sealed frames."""

    __slots__ = ("unsealer",)

    def __init__(self, key: bytes, allowed: frozenset[int]) -> None:
        super().__init__()
        self.unsealer = Unsealer(key, allowed)

    def filled(self, count: int) -> Iterator[Message]:
        view, at, end, needed = self._view, 0, self._filled + count, SEAL_BYTES
        while end - at >= SEAL_BYTES:
            needed = SEAL_BYTES + content_bytes(view[at:], CONTENT_BYTES_MAX)
            if end - at < needed:
                break
            at += needed
            yield from self.unsealer.messages(view[at - needed : at])
            needed = SEAL_BYTES
        self._make_room(at, end, needed)
