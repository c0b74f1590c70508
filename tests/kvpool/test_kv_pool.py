"""One region, several processes, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.errors import InvalidConfig, InvariantBroken, ProtocolError
from baton.kvpool import pool as pool_module
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import HEADER, HEADER_BYTES, KVPool, pool_bytes
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PoolReady

LAYOUT = KVLayout(layers=2, kv_heads=3, head_dim=4, block_size=5, dtype="float32")

CHILD = """
import sys
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool
from baton.protocol.pool import PoolReady
layout = KVLayout(layers=2, kv_heads=3, head_dim=4, block_size=5, dtype="float32")
{attach}
assert pool.keys[6, 1, 2, 3, 4] == 42.0
pool.values[0, 0, 0, 0, 0] = 7.0
print("seen", flush=True)
sys.stdin.read()
"""


def announced(incarnation: int, blocks: int, layout: KVLayout = LAYOUT) -> PoolReady:
    return PoolReady(layout.fingerprint(), PoolIncarnation(incarnation), blocks)


def shm_names() -> set[str]:
    """Segments of ours; those of other programs come and go there."""
    found = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    return {name for name in found if "baton" in name}


def start(attach: str, **options) -> subprocess.Popen:
    code = CHILD.format(attach=attach)
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)


def test_another_process_sees_the_same_bytes_and_nothing_is_left_after_a_kill():
    names = shm_names()
    pool = KVPool.create(LAYOUT, 8)
    pool.keys[6, 1, 2, 3, 4] = 42.0
    child = start(
        f"pool = KVPool.attach({pool.fd}, PoolReady(layout.fingerprint(), {pool.incarnation}, 8))", pass_fds=[pool.fd]
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "seen\n"
    assert pool.values[0, 0, 0, 0, 0] == 7.0
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert pool.keys[6, 1, 2, 3, 4] == 42.0  # the attacher's death takes nothing along
    pool.close()
    assert shm_names() == names
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pool.fd)


def test_the_region_outlives_its_creator_while_somebody_has_it():
    """Passed over a socket, as the messenger will pass it to a restarted worker."""
    ours, theirs = socket.socketpair()
    code = (
        "import socket, sys; from baton.kvpool.layout import KVLayout; from baton.kvpool.pool import KVPool;"
        "layout = KVLayout(layers=2, kv_heads=3, head_dim=4, block_size=5, dtype='float32');"
        "pool = KVPool.create(layout, 8); pool.data[7] = 3.0;"
        f"socket.send_fds(socket.socket(fileno={theirs.fileno()}), [str(pool.incarnation).encode()], [pool.fd])"
    )
    subprocess.run([sys.executable, "-c", code], pass_fds=[theirs.fileno()], check=True)
    incarnation, (fd,), _, _ = socket.recv_fds(ours, 100, 1)
    pool = KVPool.attach(fd, announced(int(incarnation), 8))
    assert (pool.data[7] == 3.0).all()
    assert (pool.data[6] == 0.0).all()
    pool.close()
    ours.close()
    theirs.close()


def test_the_picture_in_the_docstring():
    pool = KVPool.create(LAYOUT, 3)
    half = LAYOUT.kv_heads * LAYOUT.head_dim * LAYOUT.block_size
    assert pool_bytes(LAYOUT, 3) == HEADER_BYTES + 3 * 2 * 2 * half * 4
    pool.keys[1, 1, 2, 3, 4] = 1.0
    pool.values[1, 1, 2, 4, 3] = 2.0
    block = pool.data[1]
    layer = 2 * half
    assert block[layer + (2 * LAYOUT.head_dim + 3) * LAYOUT.block_size + 4] == 1.0
    assert block[layer + half + (2 * LAYOUT.block_size + 4) * LAYOUT.head_dim + 3] == 2.0
    assert np.count_nonzero(pool.data) == 2
    assert pool.data.ctypes.data % 64 == 0
    del block
    pool.close()


def test_another_layout_is_refused():
    pool = KVPool.create(LAYOUT, 2)
    for change in ({"block_size": 4}, {"dtype": "bfloat16"}, {"format": "token-major"}, {"layers": 1}):
        with pytest.raises(ProtocolError, match="another layout"):
            KVPool.attach(pool.fd, announced(pool.incarnation, 2, replace(LAYOUT, **change)))
    pool.close()


def test_another_pool_of_the_same_layout_is_refused():
    """Descriptor numbers and process numbers are reused, incarnations are not."""
    pool, other = KVPool.create(LAYOUT, 2), KVPool.create(LAYOUT, 2)
    with pytest.raises(ProtocolError, match="another KV pool"):
        KVPool.attach(other.fd, pool.announcement())
    pool.close()
    other.close()


def test_an_attacher_learns_the_layout_from_the_pool():
    """The cache service knows no model: the announced fingerprint is all it compares."""
    pool = KVPool.create(LAYOUT, 2)
    attached = KVPool.attach(os.dup(pool.fd), pool.announcement())
    assert (attached.layout, attached.blocks) == (LAYOUT, 2)
    attached.close()
    pool.close()


def test_a_broken_header_is_refused():
    pool = KVPool.create(LAYOUT, 2)
    os.pwrite(pool.fd, b"{", HEADER.size + 3)
    with pytest.raises(ProtocolError, match="no layout of KV blocks"):
        KVPool.attach(pool.fd, pool.announcement())
    pool.close()


def test_what_is_no_pool_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"hello")
    fd = os.open(file, os.O_RDWR)
    with pytest.raises(ProtocolError, match="does not lead to a KV pool"):
        KVPool.attach(fd, announced(1, 1))
    os.close(fd)


def test_nobody_can_cut_it_short():
    pool = KVPool.create(LAYOUT, 2)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, 100)
    pool.close()


def test_closing_while_in_use_is_found_out():
    pool = KVPool.create(LAYOUT, 2)
    kept = pool.keys
    with pytest.raises(InvariantBroken, match="still in use"):
        pool.close()
    del kept


def test_more_than_there_is_fails_before_any_of_it_is_reserved(monkeypatch: pytest.MonkeyPatch):
    """The kernel would reserve what there is, and then look for somebody to kill."""
    monkeypatch.setattr(pool_module, "_anonymous_file", lambda size, name: pytest.fail("it is reserved"))
    with pytest.raises(InvalidConfig, match="does not fit"):
        KVPool.create(LAYOUT, 2**50 // LAYOUT.block_bytes)
    with pytest.raises(InvalidConfig, match="at least one"):
        KVPool.create(LAYOUT, 0)


def test_all_of_it_is_reserved_from_the_start():
    """What does not fit fails here, and not as a dead process in the middle of a request."""
    pool = KVPool.create(LAYOUT, 64)
    assert os.fstat(pool.fd).st_blocks * 512 >= pool_bytes(LAYOUT, 64)
    pool.close()


def test_one_that_cannot_be_mapped_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch):
    """The descriptor alone would hold it: all of it is reserved."""

    def fails(*arguments: object) -> None:
        raise OSError("no room for a mapping")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("mmap.mmap", fails)
    with pytest.raises(OSError, match="no room for a mapping"):
        KVPool.create(LAYOUT, 2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_fours_are_not_shown_as_if_they_lay_one_by_one():
    """The kernels for bytes store numbers in fours: a view of single ones would show other numbers than are there."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=64, block_size=16, dtype="int8", format="int8-fours")
    pool = KVPool.create(layout, 1)
    assert not hasattr(pool, "keys")
    assert not hasattr(pool, "values")
    assert pool.data.shape == (1, layout.block_numbers)
    pool.close()


def test_the_same_numbers_in_another_order_have_another_fingerprint():
    """A GPU's blocks and those of a processor are of one size, and mean nothing to each other."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=64, block_size=16, dtype="bfloat16")
    kinds = [("float16", "turned"), ("bfloat16", "turned"), ("bfloat16", "token-major")]
    layouts = [replace(layout, dtype=dtype, format=form) for dtype, form in kinds]
    assert len({one.block_bytes for one in layouts}) == 1
    assert len({one.fingerprint() for one in layouts}) == len(kinds)
    assert [KVLayout.decode(one.encode()) for one in layouts] == layouts
