"""The form of messages that cross machines: a build reads frames of every version in its range, older and newer than itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect

pytest.importorskip("xxhash", reason="the messages of the cache's sessions need xxhash (pip install xxhash)")

from baton.protocol.codec import FROM_INSTANCE, FROM_PEER, FROM_READER, FROM_ROUTER, MESSAGES, decode, encode
from baton.protocol.control import InstanceReady
from baton.protocol.instance import Build, InstanceHello, InstanceRefused, RouterHello
from baton.protocol.output import Begun, Emit, Ended
from baton.protocol.pool import PoolReady, ReadPool
from baton.protocol.request import FinishReason, GenerateRequest
from baton.protocol.step import BatchRows, NewSequence, StepPlan, StepResult
from baton.protocol.versions import VERSIONS

FORM_8 = {
    "AbortRequest": "request index reason",
    "Adopted": "request attempt tokens",
    "Release": "request attempt",
    "Heartbeat": "fault token_seconds blocks_available slots_free waiting_tokens decoding stalled preempted",
    "Begun": "request attempt index cached_tokens host_tokens storage_tokens",
    "BlocksFollow": "nbytes digest",
    "ClearCache": "number device host",
    "DeviceMemory": "layout gpu",
    "Emit": "tokens ended logprobs begun",
    "Ended": "request index reason prompt_tokens cached_tokens output_tokens preemptions error detail attempt host_tokens "
    "storage_tokens",
    "Reserve": "request lease_seconds",
    "Reserved": "request attempt cached_tokens",
    "Forget": "request attempt",
    "GenerateBatch": "first others",
    "InstanceReady": "blocks block_size slots vocab_size context_tokens model_context_tokens sampling_defaults identity plan "
    "identity_parts",
    "ModeReport": "mode",
    "ModelChanged": "model identity identity_parts",
    "InstanceHello": "name incarnation role ready layout peers health_url pid adopt_seconds_max model refused "
    "capabilities build",
    "InstanceRefused": "reason",
    "Offer": "request attempt pool place blocks tokens last cached_tokens host_tokens storage_tokens",
    "OrderAnswer": "number outcome detail",
    "PauseInstance": "number drain_seconds_max",
    "PeerOffer": "offer peers outputs",
    "Ping": "number",
    "Pong": "number fault",
    "PoolReady": "fingerprint incarnation blocks memory capabilities",
    "Prefill": "request keep_seconds",
    "ReadBlocks": "runs",
    "ReadPool": "pool fingerprint capabilities",
    "ReadRefused": "reason",
    "RefusedRequest": "request refused attempt",
    "Released": "request attempt kept",
    "ResumeInstance": "number",
    "RepetitionStop": "pattern_max pattern_min count_min tokens_min",
    "RouterHeartbeat": "",
    "RouterHello": "router beat_seconds lapse_seconds capabilities build",
    "RowLogprobs": "slot incarnation sampled prompt_from prompt embedding",
    "SleepInstance": "number",
    "TokenLogprob": "token logprob rank top",
    "WakeInstance": "number model",
}
"""Fields of version 8, in their order on the wire. While version 8 is in the range they stay; others may follow them."""
OPTIONAL = {"CachedKeys": "whole added removed"}
"""Messages that need a capability of their receiver (protocol/versions.py)."""


def structs_of(info: Any, found: dict[str, type]) -> None:
    """All Struct classes inside a type."""
    if isinstance(info, inspect.StructType):
        if info.cls.__name__ in found:
            return
        found[info.cls.__name__] = info.cls
        for field in info.fields:
            structs_of(field.type, found)
    for inner in (*getattr(info, "types", ()), *getattr(info, "item_types", ())):
        structs_of(inner, found)
    for name in ("item_type", "key_type", "value_type"):
        if hasattr(info, name):
            structs_of(getattr(info, name), found)


def between_machines() -> dict[str, type]:
    found: dict[str, type] = {}
    kinds = FROM_INSTANCE | FROM_ROUTER | FROM_READER | FROM_PEER
    for kind in kinds:
        structs_of(inspect.type_info(MESSAGES[kind]), found)
    return found


def test_fields_of_version_8_keep_their_places_and_later_ones_have_defaults():
    assert VERSIONS.oldest == 8, "when version 8 is dropped, write down the form of the next one"
    arrays = {name: cls for name, cls in between_machines().items() if cls.__struct_config__.array_like}
    assert sorted(arrays) == sorted(FORM_8 | OPTIONAL), "a new message of a newer version belongs into a table of its own"
    for name, cls in arrays.items():
        form = (FORM_8 | OPTIONAL)[name].split()
        assert list(cls.__struct_fields__[: len(form)]) == form, name
        added = msgspec.structs.fields(cls)[len(form) :]
        assert all(not field.required for field in added), name


def test_messages_that_are_maps_have_defaults_for_all_that_is_not_of_version_8():
    maps = {name: cls for name, cls in between_machines().items() if not cls.__struct_config__.array_like}
    required = {
        name: [field.encode_name for field in msgspec.structs.fields(cls) if field.required] for name, cls in maps.items()
    }
    assert {name: fields for name, fields in required.items() if fields} == {
        "GenerateRequest": ["id", "prompt"],
        "Grammar": ["kind"],
        "Refused": ["reason"],
        "Thinking": ["end"],
    }


def shorter(message: Any, fields: int) -> bytes:
    """A frame of the message with its first fields only, as an older build writes it."""
    body = msgspec.msgpack.encode(msgspec.msgpack.decode(msgspec.msgpack.encode(message))[:fields])
    whole = encode(message)
    return whole[:4] + len(body).to_bytes(4, "big") + body


READY = InstanceReady(64, 16, 8, 300, 512, 512, identity=b"weights")


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (InstanceHello("a", 1, "mixed", READY, b"layout"), 5),
        (InstanceHello("a", 1, "mixed", READY, b"layout", model="/m", refused=True), 11),
        (RouterHello("r", 0.25, 2.0), 3),
        (InstanceRefused("another model"), 1),
        (READY, 8),
        (ReadPool(7, b"f"), 2),
        (PoolReady(b"f", 7, 64), 3),
        (Emit([("a", 1, 0, 0, [7])], [Ended("a", 0, FinishReason.STOP, 3, 0, 1, 0)]), 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, msgspec.Struct) else str(value),
)
def test_a_message_of_an_older_build_is_read_with_defaults_for_what_it_lacks(message: Any, fields: int):
    assert decode(shorter(message, fields)) == message


def test_fields_of_a_newer_build_are_ignored():
    hello = InstanceHello("a", 1, "mixed", READY, b"layout")
    body = msgspec.msgpack.encode([*msgspec.msgpack.decode(msgspec.msgpack.encode(hello)), "new", 5])
    assert decode(encode(hello)[:4] + len(body).to_bytes(4, "big") + body) == hello
    asked = GenerateRequest(id="a", prompt=(1, 2))
    newer = {**msgspec.msgpack.decode(msgspec.msgpack.encode(asked)), "of_a_newer_build": [1]}
    body = msgspec.msgpack.encode(newer)
    assert decode(encode(asked)[:4] + len(body).to_bytes(4, "big") + body) == asked


PLACES = [
    InstanceHello(
        "a", 1, "mixed", READY, b"layout", ("unix:/a", "unix:/b"), capabilities=("x",), build=Build("1", "c0ffee", 2.5)
    ),
    RouterHello("r", 0.25, 2.0, ("x",), Build("1", "c0ffee", 2.5)),
    InstanceReady(64, 16, 8, 300, 512, identity_parts={"weights": "12ab", "kernels": "avx2 1"}),
    ReadPool(7, b"f", ("x",)),
    PoolReady(b"f", 7, 64, None, ("x",)),
    GenerateRequest(id="a", prompt=(1, 2), extras=((1, b"digest"),), traceparent=f"00-{'a' * 32}-{'b' * 16}-01"),
    StepPlan(1, 1, new=(NewSequence(0, 1, (5,), 1, 0, (3,), 0, 0, adapter=4),), run=BatchRows((0, 1), (1, 1), (3, 0))),
    StepResult(1, 1, (0, 1), (1, 1), (3, 1), (7, 8, 9, 5), drafted=(2, 0)),
    Emit([("a", 1, 0, 0, 7), ("a", 1, 0, 1, [8, 9])], []),
    Emit([("a", 1, 0, 0, [7, 8, 9])], [], begun=[Begun("a", 1, 0, 32, 16, 8)]),
]


@pytest.mark.parametrize("message", PLACES, ids=lambda message: type(message).__name__)
def test_every_place_survives_a_round_trip(message: Any):
    assert decode(encode(message)) == message


def test_a_result_may_have_several_tokens_in_a_row():
    assert StepResult(1, 1, (0, 1), (1, 1), (3, 1), (7, 8, 9, 5)).rows == [(0, 1, (7, 8, 9)), (1, 1, (5,))]


@pytest.mark.parametrize(
    "traceparent", ["x", f"00-{'A' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'b' * 16}-01\n", f"00-{'a' * 31}-{'b' * 16}-01"]
)
def test_a_traceparent_that_is_none_is_not_read(traceparent: str):
    good = GenerateRequest(id="a", prompt=(1,), traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    body = msgspec.msgpack.encode({**msgspec.to_builtins(good), "traceparent": traceparent})
    with pytest.raises(Exception, match="not a GenerateRequest"):
        decode(encode(good)[:4] + len(body).to_bytes(4, "big") + body)
