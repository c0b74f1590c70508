"""What the pool of a GPU says where there is none, and what can be said about it without one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import DeviceError, ProtocolError
from baton.kvcache import shared_memory
from baton.kvpool import cuda_driver
from baton.kvpool.device_pool import DevicePool
from baton.kvpool.layout import KVLayout
from baton.kvpool.open import attach_pool, create_pool
from baton.protocol.codec import decode, encode
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import DeviceMemory, PoolReady

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16", format="token-major")
MEMORY = DeviceMemory(LAYOUT.encode(), "a GPU")
READY = PoolReady(LAYOUT.fingerprint(), PoolIncarnation(7), 8, MEMORY)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", missing)
    for cached in (cuda_driver._library, cuda_driver._primary_context):
        cached.cache_clear()
    yield
    for cached in (cuda_driver._library, cuda_driver._primary_context):
        cached.cache_clear()


def test_the_announcement_says_where_the_memory_is():
    assert decode(encode(READY)) == READY
    assert decode(encode(PoolReady(b"f", PoolIncarnation(1), 2))).memory is None


def test_without_a_driver_it_says_so(no_driver):
    with pytest.raises(DeviceError, match="there is no NVIDIA driver here"):
        create_pool(LAYOUT, 4)
    fd = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(DeviceError, match="there is no NVIDIA driver here"):
        attach_pool(fd, READY)
    os.close(fd)  # it was still ours: whoever called closes it


def test_the_descriptor_of_a_peers_pool_that_cannot_be_opened_is_closed_once(no_driver):
    """A second close would hit whatever another thread has opened meanwhile under the same number: a file of the storage."""
    fd = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(DeviceError, match="there is no NVIDIA driver here"):
        shared_memory._map(encode(READY), [fd], READY.incarnation, READY.fingerprint)
    assert not Path(f"/proc/self/fd/{fd}").exists()


def test_a_pool_of_another_layout_is_refused_before_it_is_opened(no_driver):
    other = replace(LAYOUT, layers=3)
    with pytest.raises(ProtocolError, match="another layout than was announced"):
        DevicePool.attach(0, PoolReady(other.fingerprint(), PoolIncarnation(7), 8, MEMORY))


def test_other_formats_are_in_shared_memory():
    pool = create_pool(replace(LAYOUT, format="turned"), 2)
    again = attach_pool(os.dup(pool.fd), pool.announcement(), read_only=True)
    assert again.incarnation == pool.incarnation
    again.close()
    pool.close()
