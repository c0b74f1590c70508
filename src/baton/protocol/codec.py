"""Frames on a control connection: magic, version, kind, length, msgpack. Nothing is ever unpickled.

    0      2         3      4            8
    | "BT" | version | kind | length u32 | msgpack body, exactly `length` bytes

Whatever the bytes are, `decode` returns a message or raises one of the six errors below, never anything else: a peer
that sends garbage is closed and counted, it cannot hurt the process.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from baton.errors import CallerError, ProtocolError
from baton.protocol.control import (
    AbortRequest,
    CacheHello,
    CacheStats,
    ClearCache,
    InstanceReady,
    InstanceStats,
    LoadProgress,
    ModelChanged,
    ModeReport,
    OrderAnswer,
    PauseInstance,
    Ping,
    Pong,
    ProgressShared,
    RefusedRequest,
    ResumeInstance,
    SleepInstance,
    StartFailed,
    WakeInstance,
    WorkerHello,
)
from baton.protocol.handoff import (
    Adopted,
    AskRelease,
    Expect,
    Expecting,
    Forget,
    HandoffMessage,
    Offer,
    PeerOffer,
    Prefill,
    Released,
)
from baton.protocol.moves import BlockMove, MoveResult, StorageAnswer, StorageQuery
from baton.protocol.node import Beat, ClusterView, NodeHello, NodeRefused, RouterBeat, RouterHello
from baton.protocol.output import Emit
from baton.protocol.pool import (
    BlocksFollow,
    CreatePool,
    DetachPool,
    HostPoolReady,
    PeerSocket,
    PoolAttached,
    PoolDetached,
    PoolReady,
    PoolSized,
    ReadBlocks,
    ReadersSocket,
    ReadPool,
    ReadRefused,
)
from baton.protocol.request import GenerateBatch, GenerateRequest
from baton.protocol.step import StepPlan, StepResult
from baton.protocol.versions import VERSIONS

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
    | GenerateBatch
    | OrderAnswer
    | ProgressShared
    | SleepInstance
    | WakeInstance
    | ModelChanged
    | StorageQuery
    | StorageAnswer
    | CacheHello
    | CacheStats
    | PeerSocket
    | PoolSized
    | PoolReady
    | PoolAttached
    | DetachPool
    | PoolDetached
    | HostPoolReady
    | ReadPool
    | ReadRefused
    | ReadersSocket
    | ReadBlocks
    | BlocksFollow
    | ClearCache
    | CreatePool
    | HandoffMessage
    | NodeHello
    | RouterHello
    | NodeRefused
    | Beat
    | RouterBeat
    | ClusterView
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
    19: GenerateBatch,
    20: OrderAnswer,
    21: ProgressShared,
    22: SleepInstance,
    23: WakeInstance,
    24: ModelChanged,
    40: StorageQuery,
    41: StorageAnswer,
    42: CacheHello,
    43: CacheStats,
    30: PeerSocket,
    31: PoolSized,
    32: PoolReady,
    33: PoolAttached,
    34: DetachPool,
    35: PoolDetached,
    36: CreatePool,
    37: HostPoolReady,
    38: ReadPool,
    39: ReadRefused,
    44: ClearCache,
    45: ReadersSocket,
    46: ReadBlocks,
    47: BlocksFollow,
    50: Expect,
    51: Expecting,
    52: Prefill,
    53: Offer,
    54: PeerOffer,
    55: AskRelease,
    56: Released,
    57: Adopted,
    58: Forget,
    60: NodeHello,
    61: RouterHello,
    62: NodeRefused,
    63: Beat,
    64: RouterBeat,
    65: ClusterView,
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


class MessageTooLarge(CallerError):
    """Our own message does not go in a frame. No fault of the peer, so no ProtocolError."""


def kinds_of(*messages: type[Message]) -> frozenset[int]:
    """Their numbers on the wire."""
    return frozenset(_KIND_OF[message] for message in messages)


def name_of(kind: int) -> str:
    known = _KINDS.get(kind)
    return f"kind {kind}" if known is None else known.__name__


def is_known(kind: int) -> bool:
    return kind in _KINDS


def encode(message: Message, version: int = VERSIONS.newest) -> bytes:
    """`version`: the one that the session has agreed on."""
    body = _ENCODER.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise MessageTooLarge(f"a {type(message).__name__} of {len(body)} bytes; at most {FRAME_BYTES_MAX} go in a frame")
    return _HEADER.pack(_MAGIC, version, _KIND_OF[type(message)], len(body)) + body


def read_header(data: bytes | memoryview, at: int = 0) -> tuple[int, int]:
    """Kind and body length of the frame that begins there. Refuses what `decode` would refuse, before anything as large as the
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
        raise UnknownKind(f"kind {kind}; known are {', '.join(map(str, _KINDS))}")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise MalformedBody(f"not a {_KINDS[kind].__name__}: {error}") from error


def decode(frame: bytes) -> Message:
    kind, length = read_header(frame)
    there = len(frame) - HEADER_BYTES
    if there > length:
        raise OversizedFrame(f"{there} body bytes, {length} promised")
    if there < length:
        raise TruncatedFrame(f"{there} body bytes of {length}")
    return decode_body(kind, memoryview(frame)[HEADER_BYTES:])
