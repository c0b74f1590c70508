"""Proofs and frames, byte by byte: none of another handshake, and none after a missing one."""

from __future__ import annotations

import pytest
from link_rig import SECRET

from baton.errors import LinkFailed
from baton.protocol.codec import FROM_INSTANCE, encode
from baton.protocol.control import Pong
from baton.trust.handshake import Handshake, make_greeting
from baton.trust.seal import SealedBuffer, Sealer

KEY = b"k" * 32


def frames(count: int) -> list[bytes]:
    sealer = Sealer(KEY)
    return [sealer.seal([encode(Pong(number))]) for number in range(count)]


def read(*sealed: bytes) -> list[int]:
    """The numbers of what is read. Raises what ends it."""
    buffer, numbers = SealedBuffer(KEY, FROM_INSTANCE), []
    for frame in sealed:
        buffer.room()[: len(frame)] = frame
        numbers += [message.number for message in buffer.filled(len(frame))]
    return numbers


def test_a_frame_after_a_missing_one_is_not_read():
    """Somebody on the way has taken one out: tokens would be missing in the middle of an answer."""
    first, _, third = frames(3)
    assert read(first) == [0]
    with pytest.raises(LinkFailed, match="frame 2 of the session came where 1 was due") as failed:
        read(first, third)
    assert failed.value.reason == "replay"


def test_frames_in_another_order_are_not_read():
    first, second = frames(2)
    assert read(first, second) == [0, 1]
    with pytest.raises(LinkFailed, match="frame 1 of the session came where 0 was due"):
        read(second, first)


@pytest.mark.parametrize("side", ["router", "instance"])
def test_both_nonces_are_in_every_proof_and_key(side: str):
    """Else who has listened to one handshake could be the router of the next, with its greeting and its proof."""
    greeting, reply = make_greeting(), make_greeting()
    proof, keys = Handshake(SECRET, greeting, reply).proof(side), Handshake(SECRET, greeting, reply).keys()
    Handshake(SECRET, greeting, reply).check(side, proof)
    for other in (Handshake(SECRET, greeting, make_greeting()), Handshake(SECRET, make_greeting(), reply)):
        with pytest.raises(LinkFailed, match="does not know our cluster secret"):
            other.check(side, proof)
        assert not {*other.keys()} & {*keys}


@pytest.mark.parametrize("place", [0, 4, 6], ids=["magic", "version of sessions", "oldest version of messages"])
def test_whoever_speaks_another_version_is_told_before_anything_is_proved(place: int):
    """Messages of another version would be taken for others."""
    greeting, other = make_greeting(), bytearray(make_greeting())
    other[place] += 1
    for pair in ((greeting, bytes(other)), (bytes(other), greeting)):
        with pytest.raises(LinkFailed) as failed:
            Handshake(SECRET, *pair)
        assert failed.value.reason == "version"
