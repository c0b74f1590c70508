"""Messages between helper.py and helper_child.py: msgpack with a length prefix, over a socket pair.

msgpack, because its encoding is as fast as copying: the encoder holds the interpreter lock, and all streams wait for it. JSON
from a client may have two things that msgpack lacks: lone surrogates become U+FFFD, as in every prompt, and integers over 64
bits travel as an extension.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

import msgspec

from baton.text.clean import replace_lone_surrogates

_LENGTH = struct.Struct("<I")
FRAME_BYTES_MAX = 2**32 - 1
_INTEGER = 1


def frame(value: Any) -> bytearray:
    """A message as bytes. Raises TypeError or RecursionError for a value outside of JSON, or nested too deeply."""
    content = bytearray(_LENGTH.size)
    try:
        _encoder.encode_into(value, content, _LENGTH.size)
    except (UnicodeEncodeError, OverflowError):
        _encoder.encode_into(_encodable(value), content, _LENGTH.size)
    _LENGTH.pack_into(content, 0, len(content) - _LENGTH.size)
    return content


def send(sock: socket.socket, message: bytearray, deadline: float | None = None) -> None:
    """Send a message. Raises TimeoutError at the deadline, ConnectionError if the peer is gone."""
    _set_timeout(sock, deadline)
    sock.sendall(message)


def receive(sock: socket.socket, bytes_max: int = FRAME_BYTES_MAX, deadline: float | None = None) -> Any:
    """Receive a message. Raises TimeoutError at the deadline, ConnectionError at end of file, ValueError for an invalid
    message."""
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size, deadline))
    if length > bytes_max:
        raise ValueError(f"a message of {length} bytes, and {bytes_max} are allowed")
    return _decoder.decode(_read(sock, length, deadline))


def _read(sock: socket.socket, count: int, deadline: float | None) -> bytearray:
    content = bytearray(count)
    view, filled = memoryview(content), 0
    while filled < count:
        _set_timeout(sock, deadline)
        received = sock.recv_into(view[filled:])
        if not received:
            raise ConnectionError("the other side is gone")
        filled += received
    return content


def _set_timeout(sock: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return replace_lone_surrogates(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return msgspec.msgpack.Ext(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {replace_lone_surrogates(str(key)): _encodable(item) for key, item in value.items()}
    return value


def _from_extension(code: int, content: memoryview) -> int:
    if code != _INTEGER:
        raise ValueError(f"the extension {code} is not known")
    return int.from_bytes(content, "big", signed=True)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ext_hook=_from_extension)
