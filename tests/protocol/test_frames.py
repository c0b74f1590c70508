"""Bytes to messages, however the bytes are cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.protocol import frames as module
from baton.protocol.codec import encode
from baton.protocol.control import Ping, StartFailed
from baton.protocol.frames import BUFFER_BYTES, FrameBuffer

MESSAGES = st.lists(
    st.one_of(
        st.integers(0, 2**60).map(Ping),
        st.integers(0, 40).map(lambda size: StartFailed("x" * size)),
        st.integers(BUFFER_BYTES - 20, 3 * BUFFER_BYTES).map(lambda size: StartFailed("y" * size)),
    ),
    max_size=12,
)


def fed(buffer: FrameBuffer, data: bytes, cuts: list[int]) -> list:
    """Reads as a socket would: never more than there is room for."""
    taken, at, cuts = [], 0, list(cuts)
    while at < len(data):
        room = buffer.room()
        assert len(room) > 0
        count = min(len(room), len(data) - at, cuts.pop() if cuts else BUFFER_BYTES)
        room[:count] = data[at : at + count]
        taken += buffer.filled(count)
        at += count
    return taken


@settings(max_examples=5 * settings.default.max_examples, deadline=None)
@given(messages=MESSAGES, cuts=st.lists(st.one_of(st.integers(1, 12), st.integers(1, 2 * BUFFER_BYTES)), max_size=60))
def test_the_same_messages_however_the_bytes_are_cut(messages, cuts):
    assert fed(FrameBuffer(), b"".join(map(encode, messages)), cuts) == messages


def test_a_large_frame_leaves_no_large_buffer():
    buffer = FrameBuffer()
    large = encode(StartFailed("z" * (5 * BUFFER_BYTES)))
    assert fed(buffer, large[:-1], []) == []
    assert len(buffer._view) == len(large)
    assert fed(buffer, large[-1:] + encode(Ping(1)), []) == [StartFailed("z" * (5 * BUFFER_BYTES)), Ping(1)]
    assert len(buffer._view) == module.BUFFER_BYTES
