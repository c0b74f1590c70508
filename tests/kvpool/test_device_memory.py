"""The KV pool on a GPU lives as long as its descriptor: the rules of the driver are those of fake_cuda.py here, and the
driver's own in tests/gpu/test_device_pool.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import fake_cuda
import pytest
from fake_cuda import FakeDriver, contents, fill

from baton.errors import DeviceError, InvalidConfig, ProtocolError
from baton.kvpool import cuda_driver
from baton.kvpool.copies import CopySpan, copy_runs
from baton.kvpool.device_pool import DevicePool
from baton.kvpool.layout import KVLayout
from baton.kvpool.open import attach_pool, create_pool
from baton.protocol.codec import encode
from baton.protocol.pool import DeviceMemory, PoolReady
from baton.worker.platforms.visible import without_peer_access

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16", format="token-major")
DEADLINE_SECONDS = 30


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    for name in ("_library",):
        monkeypatch.setattr(cuda_driver, name, getattr(cuda_driver, name))  # puts it back afterwards
    return fake_cuda.install()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def child(script: str, *arguments: str, fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    folder = str(Path(__file__).parent)
    begin = f"import sys; sys.path.insert(0, {folder!r}); import fake_cuda; fake_cuda.install()\n"
    return subprocess.Popen([sys.executable, "-c", begin + script, *arguments], pass_fds=fds)


CREATOR = """
import signal, socket
from baton.kvpool.device_pool import DevicePool
from baton.protocol.codec import encode
from test_device_memory import LAYOUT
link = socket.socket(fileno=int(sys.argv[1]))
pool = DevicePool.create(LAYOUT, 3)
fake_cuda.fill(pool, [5, 6, 7])
socket.send_fds(link, [encode(pool.announcement())], [pool.fd])
signal.pause()
"""


def test_the_pool_outlives_the_process_that_created_it(driver):
    """The cache service is killed; the engine still holds the descriptor and hands it to the next cache service and worker."""
    ours, theirs = socket.socketpair()
    creator = child(CREATOR, str(theirs.fileno()), fds=(theirs.fileno(),))
    content, (fd,), _, _ = socket.recv_fds(ours, 4096, 1)
    creator.kill()
    assert creator.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    ready = cuda_message(content)
    for _ in range(2):
        pool = attach_pool(os.dup(fd), ready)
        assert isinstance(pool, DevicePool)
        assert (contents(pool), pool.incarnation) == ([5, 6, 7], ready.incarnation)
        pool.close()
    os.close(fd)
    ours.close()
    theirs.close()


def cuda_message(content: bytes) -> PoolReady:
    from baton.protocol.codec import decode

    message = decode(content)
    assert isinstance(message, PoolReady)
    return message


WRITER = """
import ctypes, os
from baton.kvpool.device_pool import DevicePool
from baton.protocol.codec import decode
pool = DevicePool.attach(int(sys.argv[2]), decode(bytes.fromhex(sys.argv[1])), read_only=sys.argv[3] == "read")
assert fake_cuda.contents(pool) == [1, 2]
fake_cuda.fill(pool, [9, 9])
"""


@pytest.mark.parametrize(("access", "status", "left"), [("read", -signal.SIGSEGV, [1, 2]), ("write", 0, [9, 9])])
def test_a_reader_cannot_write(driver, access, status, left):
    pool = DevicePool.create(LAYOUT, 2)
    fill(pool, [1, 2])
    announced = encode(pool.announcement()).hex()
    writer = child(WRITER, announced, str(pool.fd), access, fds=(pool.fd,))
    assert writer.wait(DEADLINE_SECONDS) == status
    assert contents(pool) == left
    pool.close()


def test_an_instance_on_the_same_gpu_reads_it_from_pool_to_pool(driver):
    theirs, ours = DevicePool.create(LAYOUT, 4), DevicePool.create(LAYOUT, 4)
    fill(theirs, [1, 2, 3, 4])
    fill(ours, [0, 0, 0, 0])
    opened = attach_pool(theirs.reading_descriptor(), theirs.announcement(), read_only=True)
    assert copy_runs(opened, ours, [CopySpan(1, 0, 2), CopySpan(3, 3, 1)], lambda: True) == 3
    assert contents(ours) == [2, 3, 0, 4]
    for pool in (opened, theirs, ours):
        pool.close()


def test_nothing_is_left_of_a_closed_pool(driver):
    before = descriptors()
    pool = create_pool(LAYOUT, 3)
    assert os.get_inheritable(pool.fd) is False
    assert list(driver.mapped.values()) == [fake_cuda.GRANULARITY], "rounded up"
    assert not driver.handles, "released right after it was mapped"
    pool.close()
    pool.close()
    assert (descriptors(), driver.mapped) == (before, {})
    assert "closed" in repr(pool)


def test_a_pool_that_does_not_fit_is_refused(driver):
    before = descriptors()
    with pytest.raises(InvalidConfig, match=r"2\.00 GiB does not fit into the 1\.00 GiB that are free on the GPU"):
        DevicePool.create(LAYOUT, 2**31 // LAYOUT.block_bytes)
    assert descriptors() == before


def test_memory_that_is_smaller_than_announced_is_refused_and_nothing_is_left(driver):
    pool = DevicePool.create(LAYOUT, 1)
    ready = pool.announcement()
    large = PoolReady(ready.fingerprint, ready.incarnation, 2 + fake_cuda.GRANULARITY // LAYOUT.block_bytes, ready.memory)
    before, mapped, fd = descriptors(), dict(driver.mapped), os.dup(pool.fd)
    with pytest.raises(DeviceError, match="cuMemMap"):
        attach_pool(fd, large)
    os.close(fd)  # it was still ours
    assert (descriptors(), driver.mapped, driver.handles) == (before, mapped, {})
    pool.close()


def test_what_is_no_announcement_of_it_is_refused(driver):
    pool = DevicePool.create(LAYOUT, 1)
    ready = pool.announcement()
    with pytest.raises(ProtocolError, match="does not say on which"):
        DevicePool.attach(pool.fd, PoolReady(ready.fingerprint, ready.incarnation, 1))
    with pytest.raises(ProtocolError, match="another layout"):
        DevicePool.attach(pool.fd, PoolReady(b"x" * 32, ready.incarnation, 1, ready.memory))
    with open(os.devnull) as nothing, pytest.raises(DeviceError, match="cuMemImportFromShareableHandle"):
        DevicePool.attach(nothing.fileno(), ready)
    pool.close()


def test_memory_of_another_gpu_is_refused_in_words(driver):
    """The number of a GPU differs between processes; its UUID does not."""
    pool = DevicePool.create(LAYOUT, 1)
    ready = pool.announcement()
    fake_cuda.install(gpus=(1,))
    with pytest.raises(DeviceError, match=f"the KV pool is on the GPU {pool.gpu}, which this process does not use"):
        DevicePool.attach(pool.fd, ready)
    fake_cuda.install(gpus=(1, 0))
    again = DevicePool.attach(os.dup(pool.fd), ready)
    assert (again.device, again.gpu) == (1, pool.gpu)


def test_a_driver_that_cannot_share_memory_says_so(driver):
    fake_cuda.install(descriptors=False)
    with pytest.raises(DeviceError, match="cannot share memory as a file descriptor"):
        DevicePool.create(LAYOUT, 1)


def test_the_announcement_says_where_the_memory_is(driver):
    pool = DevicePool.create(LAYOUT, 1)
    assert cuda_message(encode(pool.announcement())).memory == DeviceMemory(LAYOUT.encode(), cuda_driver.uuid_of(0))
    pool.close()


def test_gpus_that_cannot_read_each_other_are_found(driver):
    fake_cuda.install(gpus=(0, 1, 2, 3))
    assert without_peer_access([0, 1]) is None
    assert without_peer_access([0, 1, 2]) == (0, 2)
