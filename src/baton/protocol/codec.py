"""Frames on a control connection: magic, version, kind, length, msgpack. Nothing is ever unpickled.

    0      2         3      4            8
    | "BT" | version | kind | length u32 | msgpack body, exactly `length` bytes

For any bytes `decode` returns a message or raises one of the six errors below, never anything else: the connection to a peer
that sends garbage is closed and counted, the process is not harmed.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, get_args

import msgspec

from baton.errors import CallerError, ProtocolError
from baton.protocol import control, handoff, moves, output, pool, request, step
from baton.protocol import instance as instance_messages
from baton.protocol.versions import VERSIONS

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024

Message = (
    Annotated[request.GenerateRequest, 1, "router"]
    | Annotated[step.StepPlan, 2]
    | Annotated[step.StepResult, 3]
    | Annotated[moves.BlockMove, 4]
    | Annotated[moves.MoveResult, 5]
    | Annotated[output.Emit, 6, "instance"]
    | Annotated[control.AbortRequest, 7, "router"]
    | Annotated[control.RefusedRequest, 8, "instance"]
    | Annotated[control.Ping, 9, "router"]
    | Annotated[control.Pong, 10, "instance"]
    | Annotated[control.PauseInstance, 11, "router"]
    | Annotated[control.ResumeInstance, 12, "router"]
    | Annotated[control.ModeReport, 13, "instance"]
    | Annotated[control.LoadProgress, 14]
    | Annotated[control.WorkerHello, 15]
    | Annotated[control.InstanceReady, 16, "instance"]
    | Annotated[control.StartFailed, 17]
    | Annotated[control.InstanceStats, 18, "instance"]
    | Annotated[request.GenerateBatch, 19, "router"]
    | Annotated[control.OrderAnswer, 20, "instance"]
    | Annotated[control.ProgressShared, 21]
    | Annotated[control.SleepInstance, 22, "router"]
    | Annotated[control.WakeInstance, 23, "router"]
    | Annotated[control.ModelChanged, 24, "instance"]
    | Annotated[step.StepDigest, 25]
    | Annotated[control.CollectiveShared, 26]
    | Annotated[control.ChildHangs, 27]
    | Annotated[pool.PeerSocket, 30]
    | Annotated[pool.PoolSized, 31]
    | Annotated[pool.PoolReady, 32, "peer"]
    | Annotated[pool.PoolAttached, 33]
    | Annotated[pool.DetachPool, 34]
    | Annotated[pool.PoolDetached, 35]
    | Annotated[pool.CreatePool, 36]
    | Annotated[pool.HostPoolReady, 37]
    | Annotated[pool.ReadPool, 38, "reader"]
    | Annotated[pool.ReadRefused, 39, "peer"]
    | Annotated[moves.StorageQuery, 40]
    | Annotated[moves.StorageAnswer, 41]
    | Annotated[control.CacheHello, 42]
    | Annotated[control.CacheStats, 43]
    | Annotated[control.ClearCache, 44, "router"]
    | Annotated[pool.ReadersSocket, 45]
    | Annotated[pool.ReadBlocks, 46, "reader"]
    | Annotated[pool.BlocksFollow, 47, "peer"]
    | Annotated[moves.StorageIdentity, 48]
    | Annotated[handoff.Reserve, 50, "router"]
    | Annotated[handoff.Reserved, 51, "instance"]
    | Annotated[handoff.Prefill, 52, "router"]
    | Annotated[handoff.Offer, 53, "instance"]
    | Annotated[handoff.PeerOffer, 54, "router"]
    | Annotated[handoff.Release, 55, "router", "instance"]
    | Annotated[handoff.Released, 56, "router", "instance"]
    | Annotated[handoff.Adopted, 57, "instance"]
    | Annotated[handoff.Forget, 58, "router"]
    | Annotated[instance_messages.InstanceHello, 60, "instance"]
    | Annotated[instance_messages.RouterHello, 61, "router"]
    | Annotated[instance_messages.InstanceRefused, 62, "router"]
    | Annotated[instance_messages.Heartbeat, 63, "instance"]
    | Annotated[instance_messages.RouterHeartbeat, 64, "router"]
    | Annotated[instance_messages.ClusterView, 65]
    | Annotated[instance_messages.CachedKeys, 66, "instance"]
    | Annotated[instance_messages.RouterListening, 67]
)
"""Messages, each with its number, which never changes, and the senders that may send it from another machine."""

MESSAGES: Final[dict[int, type[Message]]] = {row.__metadata__[0]: row.__origin__ for row in get_args(Message)}


def _sent_by(sender: str) -> frozenset[int]:
    """Numbers of the messages that such a peer may send. Any other message ends its session, unread."""
    return frozenset(row.__metadata__[0] for row in get_args(Message) if sender in row.__metadata__)


FROM_ROUTER: Final = _sent_by("router")
FROM_INSTANCE: Final = _sent_by("instance")
FROM_READER: Final = _sent_by("reader")
FROM_PEER: Final = _sent_by("peer")
_KIND_OF: Final = {message: kind for kind, message in MESSAGES.items()}
_DECODERS: Final = {kind: msgspec.msgpack.Decoder(message) for kind, message in MESSAGES.items()}
_ENCODER: Final = msgspec.msgpack.Encoder()
_HEADER: Final = struct.Struct("!2sBBI")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"BT"


class NotAFrame(ProtocolError):
    """The first bytes are not our magic."""


class WrongVersion(ProtocolError):
    """The peer uses another version; the message names both."""


class UnknownKind(ProtocolError):
    """The frame is complete but its kind is not in the table."""


class TruncatedFrame(ProtocolError):
    """Fewer bytes than the header promises."""


class OversizedFrame(ProtocolError):
    """More bytes than allowed, promised or present."""


class MalformedBody(ProtocolError):
    """The body is not msgpack of that kind's shape."""


class MessageTooLarge(CallerError):
    """Raised if our own message does not fit into a frame. It is no fault of the peer, so not a ProtocolError."""


def name_of(kind: int) -> str:
    known = MESSAGES.get(kind)
    return f"kind {kind}" if known is None else known.__name__


def is_known(kind: int) -> bool:
    return kind in MESSAGES


def encode(message: Message, version: int = VERSIONS.newest) -> bytes:
    """The message as a frame. `version`: agreed on by both sides of the session."""
    body = _ENCODER.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise MessageTooLarge(f"a {type(message).__name__} of {len(body)} bytes; at most {FRAME_BYTES_MAX} go in a frame")
    return _HEADER.pack(_MAGIC, version, _KIND_OF[type(message)], len(body)) + body


def read_header(data: bytes | memoryview, at: int = 0) -> tuple[int, int]:
    """Kind and body length of the frame that begins at `at`. Raises the errors of `decode`, before anything as large as the
    body is read or allocated."""
    if len(data) - at < HEADER_BYTES:
        raise TruncatedFrame(f"{len(data) - at} bytes; a header has {HEADER_BYTES}")
    magic, version, kind, length = _HEADER.unpack_from(data, at)
    if magic != _MAGIC:
        raise NotAFrame("the frame does not begin with our magic")
    if not VERSIONS.oldest <= version <= VERSIONS.newest:
        raise WrongVersion(f"the peer speaks version {version}, we speak {VERSIONS}")
    if length > FRAME_BYTES_MAX:
        raise OversizedFrame(f"{length} body bytes, {FRAME_BYTES_MAX} allowed")
    return kind, length


def decode_body(kind: int, body: bytes | memoryview) -> Message:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise UnknownKind(f"kind {kind}; known are {', '.join(map(str, MESSAGES))}")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise MalformedBody(f"not a {MESSAGES[kind].__name__}: {error}") from error


def decode(frame: bytes) -> Message:
    kind, length = read_header(frame)
    there = len(frame) - HEADER_BYTES
    if there > length:
        raise OversizedFrame(f"{there} body bytes, {length} promised")
    if there < length:
        raise TruncatedFrame(f"{there} body bytes of {length}")
    return decode_body(kind, memoryview(frame)[HEADER_BYTES:])
