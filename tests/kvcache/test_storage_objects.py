"""An object says what it is: whatever happens to its bytes, it is found out."""

from dataclasses import replace
from random import Random

import pytest
from storage_rig import Rig, key_of, layout_of

from baton.errors import InvalidConfig
from baton.kvcache.storage.backend import Deadline, LayoutName
from baton.kvcache.storage.object import HEADER_BYTES, described, fault_of, header_fault, seal

LAYOUT = layout_of()
PAYLOAD = memoryview(bytes(range(250)) * 4)
HEADER = seal(key_of(1), LAYOUT, PAYLOAD)


def test_a_whole_object_has_no_fault():
    assert len(HEADER) == HEADER_BYTES == 128
    assert fault_of(HEADER, key_of(1), LAYOUT, PAYLOAD) is None
    assert fault_of(bytearray(HEADER), key_of(1), LAYOUT, memoryview(bytearray(PAYLOAD))) is None


def test_every_flipped_bit_of_the_header_is_found():
    for bit in range(HEADER_BYTES * 8):
        broken = bytearray(HEADER)
        broken[bit // 8] ^= 1 << bit % 8
        assert fault_of(broken, key_of(1), LAYOUT, PAYLOAD) is not None


def test_every_flipped_bit_of_the_payload_is_found():
    for bit in range(len(PAYLOAD) * 8):
        broken = bytearray(PAYLOAD)
        broken[bit // 8] ^= 1 << bit % 8
        assert fault_of(HEADER, key_of(1), LAYOUT, memoryview(broken)) == "payload"


def test_objects_of_others_are_named_as_such():
    assert fault_of(HEADER, key_of(2), LAYOUT, PAYLOAD) == "key"
    assert fault_of(HEADER, key_of(1), layout_of("another"), PAYLOAD) == "layout"
    assert fault_of(HEADER, key_of(1), layout_of(rank=1), PAYLOAD) == "layout"
    assert fault_of(HEADER, key_of(1), LAYOUT, PAYLOAD[:-1]) == "length"
    assert fault_of(HEADER[:-1], key_of(1), LAYOUT, PAYLOAD) == "length"
    assert fault_of(bytes(HEADER_BYTES), key_of(1), LAYOUT, PAYLOAD) == "magic"


def test_a_later_version_is_refused_even_with_a_right_digest(monkeypatch):
    monkeypatch.setattr("baton.kvcache.storage.object.VERSION", 2)
    later = seal(key_of(1), LAYOUT, PAYLOAD)
    monkeypatch.undo()
    assert header_fault(later) == "version"


def test_random_bytes_are_no_object():
    random = Random(1)
    assert all(header_fault(random.randbytes(HEADER_BYTES)) for _ in range(1000))


def test_a_header_describes_its_object():
    key, layout = described(HEADER)
    assert key == key_of(1)
    assert (layout.fingerprint, layout.block_bytes, layout.rank) == (LAYOUT.fingerprint, len(PAYLOAD), 0)


def test_an_identity_is_in_name_and_header():
    """By it operators find the blocks of a model; the key covers it."""
    known = replace(LAYOUT, identity=b"\xab" * 32)
    header = seal(key_of(1), known, PAYLOAD)
    assert fault_of(header, key_of(1), known, PAYLOAD) is None
    assert fault_of(header, key_of(1), LAYOUT, PAYLOAD) == fault_of(HEADER, key_of(1), known, PAYLOAD) == "layout"
    assert described(header)[1].identity == b"\xab" * 8
    assert described(HEADER)[1].identity == b""
    assert known.object_name(key_of(1)) == f"{key_of(1).hex()}-{'ab' * 8}-r0"
    assert LAYOUT.object_name(key_of(1)) == f"{key_of(1).hex()}-{LAYOUT.fingerprint[:8].hex()}-r0"


def test_names_differ_by_key_layout_and_rank(tmp_path):
    rig = Rig(tmp_path)
    layouts = [rig.layout, layout_of("another"), layout_of(rank=1)]
    names = {layout.object_name(key) for layout in layouts for key in rig.keys(range(3))}
    assert len(names) == 9


def test_a_layout_must_make_sense():
    for wrong in ({"fingerprint": b"short"}, {"block_bytes": 0}, {"rank": -1}):
        with pytest.raises(InvalidConfig):
            LayoutName(**{"fingerprint": bytes(32), "block_bytes": 10, **wrong})


def test_deadlines():
    assert not Deadline.after(60).passed()
    assert 0 < Deadline.after(60).left() <= 60
    assert Deadline.after(-1).passed()
    assert Deadline.after(-1).left() == 0
