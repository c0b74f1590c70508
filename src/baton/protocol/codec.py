"""Frames on a control connection: magic, version, kind, length, msgpack. Nothing is ever unpickled.

    0      2         3      4            8
    | "BT" | version | kind | length u32 | msgpack body, exactly `length` bytes

Whatever the bytes are, `decode` returns a message or raises one of the five leaves below, never anything else: a peer
that sends garbage is closed and counted, it cannot hurt the process.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from baton.errors import ProtocolError
from baton.protocol.control import (
    AbortRequest,
    InstanceReady,
    InstanceStats,
    LoadProgress,
    ModeReport,
    PauseInstance,
    Ping,
    Pong,
    RefusedRequest,
    ResumeInstance,
    StartFailed,
    WorkerHello,
)
from baton.protocol.moves import BlockMove, MoveResult
from baton.protocol.output import Emit
from baton.protocol.request import GenerateRequest
from baton.protocol.step import StepPlan, StepResult

VERSION: Final = 1
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024

Message = (
    GenerateRequest
    | StepPlan
    | StepResult
    | BlockMove
    | MoveResult
    | Emit
    | AbortRequest
    | RefusedRequest
    | Ping
    | Pong
    | PauseInstance
    | ResumeInstance
    | ModeReport
    | LoadProgress
    | WorkerHello
    | InstanceReady
    | StartFailed
    | InstanceStats
)

_KINDS: Final[dict[int, type[Message]]] = {
    1: GenerateRequest,
    2: StepPlan,
    3: StepResult,
    4: BlockMove,
    5: MoveResult,
    6: Emit,
    7: AbortRequest,
    8: RefusedRequest,
    9: Ping,
    10: Pong,
    11: PauseInstance,
    12: ResumeInstance,
    13: ModeReport,
    14: LoadProgress,
    15: WorkerHello,
    16: InstanceReady,
    17: StartFailed,
    18: InstanceStats,
}
_KIND_OF: Final = {message: kind for kind, message in _KINDS.items()}
_DECODERS: Final = {kind: msgspec.msgpack.Decoder(message) for kind, message in _KINDS.items()}
_ENCODER: Final = msgspec.msgpack.Encoder()
_HEADER: Final = struct.Struct("!2sBBI")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"BT"


class NotAFrame(ProtocolError):
    """The first bytes are not ours."""


class WrongVersion(ProtocolError):
    """A peer speaks another version; the message names both."""


class UnknownKind(ProtocolError):
    """The frame is whole but its kind is not in the table."""


class TruncatedFrame(ProtocolError):
    """Fewer bytes than the header promises."""


class OversizedFrame(ProtocolError):
    """More bytes than allowed, promised or present."""


class MalformedBody(ProtocolError):
    """The body is not msgpack of that kind's shape."""


def encode(message: Message) -> bytes:
    body = _ENCODER.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise OversizedFrame(f"a {type(message).__name__} of {len(body)} bytes; at most {FRAME_BYTES_MAX} go in a frame")
    return _HEADER.pack(_MAGIC, VERSION, _KIND_OF[type(message)], len(body)) + body


def body_length(header: bytes) -> int:
    """Bytes that follow a header on a stream. Refuses what `decode` would refuse, before anything is read or allocated."""
    if len(header) < _HEADER.size:
        raise TruncatedFrame(f"{len(header)} bytes; a header has {_HEADER.size}")
    magic, version, _, length = _HEADER.unpack_from(header)
    _check_header(magic, version, length)
    return int(length)


def _check_header(magic: bytes, version: int, length: int) -> None:
    if magic != _MAGIC:
        raise NotAFrame("the frame does not begin with our magic")
    if version != VERSION:
        raise WrongVersion(f"the peer speaks version {version}, we speak {VERSION}")
    if length > FRAME_BYTES_MAX:
        raise OversizedFrame(f"{length} body bytes, {FRAME_BYTES_MAX} allowed")


def decode(frame: bytes) -> Message:
    if len(frame) < _HEADER.size:
        raise TruncatedFrame(f"{len(frame)} bytes; a header has {_HEADER.size}")
    magic, version, kind, length = _HEADER.unpack_from(frame)
    _check_header(magic, version, length)
    if len(frame) > _HEADER.size + length:
        raise OversizedFrame(f"{len(frame) - _HEADER.size} body bytes, {length} promised")
    if len(frame) < _HEADER.size + length:
        raise TruncatedFrame(f"{len(frame) - _HEADER.size} body bytes of {length}")
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise UnknownKind(f"kind {kind}; known are {', '.join(map(str, _KINDS))}")
    try:
        return decoder.decode(memoryview(frame)[_HEADER.size :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise MalformedBody(f"not a {_KINDS[kind].__name__}: {error}") from error
