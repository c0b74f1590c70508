"""Frames: what is encoded comes back, and whatever else the bytes are, only a ProtocolError escapes."""

import struct

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.errors import ProtocolError
from baton.protocol.codec import (
    FRAME_BYTES_MAX,
    MESSAGES,
    MalformedBody,
    MessageTooLarge,
    NotAFrame,
    OversizedFrame,
    TruncatedFrame,
    UnknownKind,
    WrongVersion,
    decode,
    encode,
)
from baton.protocol.control import (
    AbortRequest,
    CacheHello,
    CacheStats,
    ChildHangs,
    ClearCache,
    CollectiveShared,
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
from baton.protocol.handoff import Adopted, Forget, Offer, PeerOffer, Prefill, Release, Released, Reserve, Reserved
from baton.protocol.instance import (
    CachedKeys,
    ClusterView,
    Heartbeat,
    InstanceHello,
    InstanceRefused,
    InstanceView,
    RouterHeartbeat,
    RouterHello,
    RouterListening,
)
from baton.protocol.moves import BlockMove, MoveResult, StorageAnswer, StorageIdentity, StorageQuery
from baton.protocol.output import Emit, Ended
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
from baton.protocol.request import FinishReason, GenerateBatch, GenerateRequest, Refused, SamplingParams
from baton.protocol.step import BatchRows, NewSequence, RowFailure, RowLogprobs, StepDigest, StepPlan, StepResult, TokenLogprob
from baton.protocol.versions import VERSIONS

from .strategies import values_of

KIND = {
    GenerateRequest: 1,
    StepPlan: 2,
    StepResult: 3,
    BlockMove: 4,
    MoveResult: 5,
    Emit: 6,
    AbortRequest: 7,
    RefusedRequest: 8,
    Ping: 9,
    Pong: 10,
    PauseInstance: 11,
    ResumeInstance: 12,
    ModeReport: 13,
    LoadProgress: 14,
    WorkerHello: 15,
    InstanceReady: 16,
    StartFailed: 17,
    InstanceStats: 18,
    GenerateBatch: 19,
    OrderAnswer: 20,
    ProgressShared: 21,
    SleepInstance: 22,
    WakeInstance: 23,
    ModelChanged: 24,
    StepDigest: 25,
    CollectiveShared: 26,
    ChildHangs: 27,
    StorageQuery: 40,
    StorageAnswer: 41,
    StorageIdentity: 48,
    CacheHello: 42,
    CacheStats: 43,
    PeerSocket: 30,
    PoolSized: 31,
    PoolReady: 32,
    PoolAttached: 33,
    DetachPool: 34,
    PoolDetached: 35,
    CreatePool: 36,
    HostPoolReady: 37,
    ReadPool: 38,
    ReadRefused: 39,
    ReadersSocket: 45,
    ReadBlocks: 46,
    BlocksFollow: 47,
    ClearCache: 44,
    Reserve: 50,
    Reserved: 51,
    Prefill: 52,
    Offer: 53,
    PeerOffer: 54,
    Release: 55,
    Released: 56,
    Adopted: 57,
    Forget: 58,
    InstanceHello: 60,
    RouterHello: 61,
    InstanceRefused: 62,
    Heartbeat: 63,
    RouterHeartbeat: 64,
    CachedKeys: 66,
    RouterListening: 67,
    ClusterView: 65,
}
"""Written down a second time on purpose: these numbers are on the wire and may not change."""

HEADER = struct.Struct("!2sBBI")

messages = st.one_of(*map(values_of, MESSAGES.values()))

SAMPLE = {
    GenerateRequest: GenerateRequest(id="a", prompt=(0, 1, 2), n=2, priority=-1, timeout_seconds=1.5, salt=b"s"),
    StepPlan: StepPlan(
        1, 1, ((0, 1),), (NewSequence(1, 2, (0, 5), 2, 0, (7,), 0, 0),), (), (), BatchRows((1,), (2,)), (SamplingParams(),)
    ),
    StepResult: StepResult(
        *(1, 1, (1, 2, 0), (2, 2, 1), (1, 0, 1), (0, -9)),
        failures=(RowFailure(1, 2, "NaN"),),
        logprobs=(RowLogprobs(1, 2, TokenLogprob(5, -0.5, 1, ((5, -0.5), (0, -1.5)))),),
    ),
    BlockMove: BlockMove(1, "load", (5, 6), (1, 2), 9),
    MoveResult: MoveResult(1, 1, 0.5, "disk full"),
    Emit: Emit([("a", 1, 0, 0, [7])], [Ended("a", 0, FinishReason.STOP, 3, 0, 1, 0)], [("a", 0, RowLogprobs(1, 2))]),
    AbortRequest: AbortRequest("a", 1, FinishReason.STOP),
    RefusedRequest: RefusedRequest("a", Refused("never_fits", 9, 8)),
    Ping: Ping(3),
    Pong: Pong(3, "stalled"),
    ProgressShared: ProgressShared(2),
    StepDigest: StepDigest(1, 1, b"12345678"),
    CollectiveShared: CollectiveShared(2, 4),
    ChildHangs: ChildHangs({"engine": 1}),
    SleepInstance: SleepInstance(9),
    WakeInstance: WakeInstance(10, "a model"),
    ModelChanged: ModelChanged("a model", b"identity"),
    PauseInstance: PauseInstance(7, 1.5),
    ResumeInstance: ResumeInstance(8),
    OrderAnswer: OrderAnswer(7, "overtaken", "why"),
    ModeReport: ModeReport("paused"),
    LoadProgress: LoadProgress(1, 2),
    WorkerHello: WorkerHello(1, 10, 16, 100, 8192),
    InstanceReady: InstanceReady(10, 16, 4, 100, 8192),
    StartFailed: StartFailed("no such model"),
    InstanceStats: InstanceStats(running=3, ended={"stop": 1}),
    StorageQuery: StorageQuery(1, (b"k" * 32,), 1.0),
    StorageAnswer: StorageAnswer(1, 1),
    StorageIdentity: StorageIdentity(b"i" * 32),
    CacheHello: CacheHello(7, 64, True, "file"),
    CacheStats: CacheStats({"hits": 3}),
    GenerateBatch: GenerateBatch(GenerateRequest(id="a", prompt=(0, 1)), (("b", (2,), 9),)),
    PeerSocket: PeerSocket("engine"),
    PoolSized: PoolSized(7, b"{}"),
    PoolReady: PoolReady(b"f" * 32, 9, 7),
    PoolAttached: PoolAttached(9),
    DetachPool: DetachPool(9),
    PoolDetached: PoolDetached(9),
    CreatePool: CreatePool(7, b"{}"),
    HostPoolReady: HostPoolReady(b"f", 9, 7),
    ReadPool: ReadPool(9, b"f" * 32),
    ReadRefused: ReadRefused("why"),
    ReadersSocket: ReadersSocket("tcp://10.0.0.2:8200"),
    ReadBlocks: ReadBlocks(((0, 1), (5, 2**31 - 1))),
    BlocksFollow: BlocksFollow(2**40, b"d" * 16),
    ClearCache: ClearCache(3, host=False),
    Reserve: Reserve(GenerateRequest(id="a", prompt=(0, 1)), 2.0),
    Reserved: Reserved("a", 1, 16),
    Prefill: Prefill(GenerateRequest(id="a", prompt=(0, 1)), 30.0),
    Offer: Offer("a", 1, 9, 0, (3, 4), 32),
    PeerOffer: PeerOffer(Offer("a", 1, 9, 0, (3, 4), 30, last=True), ("unix:/x",), (7,)),
    Release: Release("a", 1),
    Released: Released("a", 1, True),
    Adopted: Adopted("a", 1, 30),
    Forget: Forget("a", 1),
    InstanceHello: InstanceHello("p0", 7, "prefill", InstanceReady(10, 16, 4, 100, 8192), b"f" * 32),
    RouterHello: RouterHello("r", 0.25, 2.0),
    InstanceRefused: InstanceRefused("another model", 0.75),
    Heartbeat: Heartbeat("no progress", 0.001, stalled=True, preempted=("r1",)),
    RouterHeartbeat: RouterHeartbeat(),
    CachedKeys: CachedKeys(True, bytes(12), bytes(6)),
    RouterListening: RouterListening(),
    ClusterView: ClusterView("r", "serving", 1, 2, (InstanceView("d-0", "decode", "alive"),), {"replays": 1}),
}

SHAPED = [KIND[kind] for kind in (GenerateRequest, StepPlan, StepResult, BlockMove, MoveResult, Emit)]
"""Kinds whose bodies are like no other's. Ping and Pong, say, differ only by their kind, which is what kinds are for."""


def frame(
    body: bytes, *, magic: bytes = b"BT", version: int = VERSIONS.newest, kind: int = 1, length: int | None = None
) -> bytes:
    return HEADER.pack(magic, version, kind, len(body) if length is None else length) + body


# What is encoded comes back


def test_every_message_kind_is_tested():
    assert set(KIND) == set(SAMPLE) == set(MESSAGES.values())


@pytest.mark.parametrize("kind", MESSAGES.values(), ids=lambda kind: kind.__name__)
@given(st.data())
def test_round_trip(kind, data):
    message = data.draw(values_of(kind))
    back = decode(encode(message))
    assert back == message
    assert type(back) is kind


def test_header_is_what_the_docstring_draws():
    for message in SAMPLE.values():
        whole = encode(message)
        assert HEADER.unpack(whole[:8]) == (b"BT", VERSIONS.newest, KIND[type(message)], len(whole) - 8), message
        assert decode(whole) == message


def test_defaults_stay_off_the_wire():
    assert len(encode(GenerateRequest(id="a", prompt=(1,)))) < 32


# What is not a frame


@pytest.mark.parametrize("length", range(8))
def test_short_header(length):
    with pytest.raises(TruncatedFrame):
        decode(encode(SAMPLE[MoveResult])[:length])


@pytest.mark.parametrize("magic", [b"TB", b"\0\0", b"bt", b"GE"])
def test_wrong_magic(magic):
    with pytest.raises(NotAFrame):
        decode(frame(b"\x80", magic=magic))


@pytest.mark.parametrize("version", [0, VERSIONS.oldest - 1, VERSIONS.newest + 1, 255])
def test_wrong_version_names_both(version):
    with pytest.raises(WrongVersion, match=rf"{version}.*{VERSIONS}"):
        decode(frame(b"\x80", version=version))


def test_unknown_kind():
    for kind in {*range(256)} - {*KIND.values()}:
        with pytest.raises(UnknownKind, match=str(kind)):
            decode(frame(b"\x80", kind=kind))


def raised_by(data: bytes) -> type[Exception] | None:
    try:
        decode(data)
    except Exception as error:
        return type(error)
    return None


def test_every_truncation_and_every_excess():
    for message in SAMPLE.values():
        whole = encode(message)
        assert {raised_by(whole[:length]) for length in range(len(whole))} == {TruncatedFrame}, message
        assert {raised_by(whole + more) for more in (b"\0", b"more", whole)} == {OversizedFrame}, message


@pytest.mark.parametrize("length", [FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_oversized_promise_is_refused_before_anything_is_read(length):
    with pytest.raises(OversizedFrame, match=str(FRAME_BYTES_MAX)):
        decode(frame(b"", length=length))


def test_too_large_a_message_is_not_sent():
    with pytest.raises(MessageTooLarge):
        encode(GenerateRequest(id="a", prompt=(1,), salt=bytes(FRAME_BYTES_MAX)))


# What is a frame with a wrong body


def test_body_with_trailing_bytes():
    for message in SAMPLE.values():
        assert raised_by(frame(encode(message)[8:] + b"\0", kind=KIND[type(message)])) is MalformedBody, message


@pytest.mark.parametrize("value", [None, 1, -1, True, 0.5, "text", b"bytes", [], {}, [None] * 9, {"id": 1}, [[[[]]]]])
def test_wrong_body_shape(value):
    for kind in SHAPED:
        assert raised_by(frame(msgspec.msgpack.encode(value), kind=kind)) is MalformedBody, kind


def test_body_of_another_kind():
    for message in SAMPLE.values():
        for kind in {*SHAPED} - {KIND[type(message)]} if KIND[type(message)] in SHAPED else ():
            assert raised_by(frame(encode(message)[8:], kind=kind)) is MalformedBody, (kind, message)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": []},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"prompt": "abc"},
        {"prompt": None},
        {"id": b"bytes"},
        {"n": 0},
        {"n": 129},
        {"priority": 0.5},
        {"timeout_seconds": 0.0},
        {"timeout_seconds": -1.0},
        {"timeout_seconds": float("nan")},
        {"salt": 7},
        {"sampling": {"max_tokens": 0}},
        {"sampling": {"max_tokens": 2**31}},
        {"sampling": {"min_tokens": -1}},
        {"sampling": {"stop_token_ids": [-9]}},
        {"sampling": {"seed": 2**63}},
        {"sampling": {"temperature": -0.1}},
        {"sampling": {"temperature": float("nan")}},
        {"sampling": {"temperature": float("inf")}},
        {"sampling": {"top_p": 0.0}},
        {"sampling": {"top_p": 1.1}},
        {"sampling": {"top_k": -2}},
        {"sampling": {"min_p": float("nan")}},
    ],
    ids=str,
)
def test_request_out_of_range(wrong):
    with pytest.raises(MalformedBody):
        decode(frame(msgspec.msgpack.encode({"id": "a", "prompt": [1]} | wrong)))


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of four billion
        b"\x96\x01\x01\xdd\xff\xff\xff\xff\x01",  # in a column
        b"\xdf\xff\xff\xff\xff\xa2id",  # a map of four billion
        b"\xdb\xff\xff\xff\xff",  # a text of four gigabytes
        b"\xc6\xff\xff\xff\xff",  # bytes of four gigabytes
        b"\x91" * 100_000,  # very deep
        b"\x83\xa2id\xa1a\xa6prompt\x91\x01\xa1x" + b"\x91" * 100_000 + b"\x01",  # very deep under a name we do not know
        b"\x82\xa2id\xa1\xff\xa6prompt\x91\x01",  # text that is not UTF-8
        b"\xc1",  # a byte that msgpack never uses
        b"",
    ],
)
def test_hostile_body(body):
    for kind in SHAPED:
        assert raised_by(frame(body, kind=kind)) is MalformedBody, kind


# Fuzz


def assert_only_protocol_errors(data: bytes) -> None:
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert type(message) in MESSAGES.values()


@given(st.binary(max_size=200))
def test_random_bytes(data):
    assert_only_protocol_errors(data)


@given(st.sampled_from(sorted(KIND.values())), st.binary(max_size=200))
@example(1, b"\x80")
def test_random_bodies(kind, body):
    assert_only_protocol_errors(frame(body, kind=kind))


@given(messages, st.lists(st.integers(0, 10**6), min_size=1, max_size=4))
def test_bit_flips_of_valid_frames(message, flips):
    data = bytearray(encode(message))
    for flip in flips:
        place = flip % (len(data) * 8)
        data[place // 8] ^= 1 << place % 8
    assert_only_protocol_errors(bytes(data))


@given(messages, st.data())
def test_cut_and_spliced_bodies(message, data):
    """The header is honest, so that the body's parser sees it."""
    body = encode(message)[8:]
    begin = data.draw(st.integers(0, len(body)))
    end = data.draw(st.integers(begin, len(body)))
    spliced = body[:begin] + data.draw(st.binary(max_size=6)) + body[end:]
    assert_only_protocol_errors(frame(spliced, kind=KIND[type(message)]))


def test_all_single_bit_flips_of_the_samples():
    for message in SAMPLE.values():
        whole = encode(message)
        for place in range(len(whole) * 8):
            data = bytearray(whole)
            data[place // 8] ^= 1 << place % 8
            assert_only_protocol_errors(bytes(data))
