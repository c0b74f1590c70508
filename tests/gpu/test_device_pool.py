"""The KV pool on a GPU: attached by other processes, kept by its descriptor, copied to and from the host and between pools.

The same rules with a driver of paper: tests/kvpool/test_device_memory.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not (Path("/dev/nvidia0").exists() and torch.cuda.is_available()):
    pytest.skip("no GPU here", allow_module_level=True)

import numpy as np  # noqa: E402

from baton.errors import DeviceError, InvalidConfig, ProtocolError  # noqa: E402
from baton.kvpool import cuda_driver  # noqa: E402
from baton.kvpool.copies import CopySpan, copy_runs, tier_copies  # noqa: E402
from baton.kvpool.device_pool import DevicePool  # noqa: E402
from baton.kvpool.layout import KVLayout  # noqa: E402
from baton.kvpool.pool import KVPool  # noqa: E402
from baton.protocol.codec import decode, encode  # noqa: E402
from baton.protocol.pool import DeviceMemory, PoolReady  # noqa: E402
from baton.worker.attention.pool_tensors import device_tensor  # noqa: E402

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16", format="token-major")
DEADLINE_SECONDS = 60


@pytest.fixture
def pool():
    pool = DevicePool.create(LAYOUT, 8)
    fill(pool)
    yield pool
    pool.close()


def fill(pool: DevicePool, offset: int = 0) -> None:
    """Block n holds n + offset."""
    tensor = device_tensor(pool)
    for block in range(pool.blocks):
        tensor[block] = block + offset
    torch.cuda.synchronize()


def numbers(pool: DevicePool) -> list[float]:
    """What each block holds; all of it."""
    torch.cuda.synchronize()
    flat = device_tensor(pool).reshape(pool.blocks, -1).float()
    assert torch.equal(flat.amin(-1), flat.amax(-1))
    return flat[:, 0].tolist()


def test_the_tensor_is_the_pool_s_memory(pool):
    tensor = device_tensor(pool)
    assert (tensor.data_ptr(), tensor.shape) == (pool.address, (8, 2, 2, 2, 16, 64))
    assert tensor.numel() * 2 == pool.nbytes == 8 * LAYOUT.block_bytes


def child(script: str, pool: DevicePool, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Its arguments: the announcement, the number of the descriptor, and what is given here."""
    words = [encode(pool.announcement()).hex(), str(pool.fd), *arguments]
    command = [sys.executable, "-c", script, *words]
    return subprocess.run(command, timeout=DEADLINE_SECONDS, pass_fds=(pool.fd,), capture_output=True, text=True)


COPIER = """
import sys
from baton.kvpool.copies import CopySpan, copy_runs
from baton.kvpool.device_pool import DevicePool
from baton.protocol.codec import decode
theirs = DevicePool.attach(int(sys.argv[2]), decode(bytes.fromhex(sys.argv[1])))
ours = DevicePool.create(theirs.layout, 8)
assert copy_runs(theirs, ours, [CopySpan(2, 0, 3), CopySpan(7, 5, 1)], lambda: True) == 4
assert copy_runs(ours, theirs, [CopySpan(0, 0, 1), CopySpan(5, 1, 1)], lambda: True) == 2
assert "torch" not in sys.modules
ours.close()
theirs.close()
"""


def test_another_process_attaches_to_it_without_torch(pool):
    ran = child(COPIER, pool)
    assert ran.returncode == 0, ran.stderr
    assert numbers(pool) == [2.0, 7.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


CREATOR = """
import signal, socket, sys
import torch
from baton.kvpool.device_pool import DevicePool
from baton.protocol.codec import encode
from baton.worker.attention.pool_tensors import device_tensor
from test_device_pool import LAYOUT, fill
link = socket.socket(fileno=int(sys.argv[1]))
pool = DevicePool.create(LAYOUT, 8)
fill(pool, 40)
socket.send_fds(link, [encode(pool.announcement())], [pool.fd])
signal.pause()
"""


def test_the_pool_outlives_the_process_that_created_it():
    """The cache service is killed: the engine has the descriptor, and the next cache service and worker attach to the pool."""
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_SECONDS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    creator = subprocess.Popen(
        [sys.executable, "-c", CREATOR, str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=environment
    )
    content, (fd,), _, _ = socket.recv_fds(ours, 4096, 1)
    creator.kill()
    assert creator.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    for turn in range(2):
        pool = DevicePool.attach(os.dup(fd), decode(content))
        expected = [40.0 + block for block in range(8)] if turn == 0 else [float(block) for block in range(8)]
        assert numbers(pool) == expected
        fill(pool)  # it can be written again too, and what was written is there for the next
        pool.close()
    os.close(fd)


READER = """
import ctypes, os, sys
from baton.errors import DeviceError
from baton.kvpool import cuda_driver
from baton.kvpool.device_pool import DevicePool
from baton.protocol.codec import decode
pool = DevicePool.attach(int(sys.argv[2]), decode(bytes.fromhex(sys.argv[1])), read_only=sys.argv[3] == "read")
host = (ctypes.c_char * 4096)(*([1] * 4096))
stream = cuda_driver.CopyStream()
stream.to_host(ctypes.addressof(host), pool.address, 4096)
stream.wait()
try:
    stream.to_device(pool.address, ctypes.addressof(host), 4096)
    stream.wait()
except DeviceError as error:
    print("refused:", error)
    os._exit(7)
print("written")
"""


@pytest.mark.parametrize(("access", "status"), [("read", 7), ("write", 0)])
def test_a_reader_cannot_write(pool, access, status):
    """In a process of its own: the refusal ends that process's context. What is written is what was there."""
    ran = child(READER, pool, access)
    assert ran.returncode == status, ran.stdout + ran.stderr
    assert numbers(pool) == [float(block) for block in range(8)]
    fill(pool, 3)
    assert numbers(pool)[0] == 3.0, "our own mapping works as before"


def test_memory_is_free_when_the_last_descriptor_is_closed():
    blocks = 2**32 // LAYOUT.block_bytes
    before, _ = cuda_driver.memory_info()
    pool = DevicePool.create(LAYOUT, blocks)
    kept, held = os.dup(pool.fd), cuda_driver.memory_info()[0]
    pool.close()
    assert before - held >= 2**32
    assert before - cuda_driver.memory_info()[0] >= 2**32, "the descriptor alone keeps it"
    os.close(kept)
    assert before - cuda_driver.memory_info()[0] < 2**31


def test_blocks_go_to_the_host_and_come_back(pool):
    host = KVPool.create(LAYOUT, 8)
    copies = tier_copies(pool, host)
    copies.store([1, 6, 3], [0, 1, 7])
    assert np.array_equal(
        host.data[1], np.full(LAYOUT.block_numbers, torch.tensor(6.0).bfloat16().view(torch.int16).item(), np.uint16)
    )
    copies.load([7, 0], [0, 5])
    assert numbers(pool) == [3.0, 1.0, 2.0, 3.0, 4.0, 1.0, 6.0, 7.0]
    copies.close()
    host.close()


def test_copies_between_pools_stop_when_they_may_not_go_on(pool):
    other = DevicePool.create(LAYOUT, 8)
    fill(other, 100)
    answers = iter([True, False])
    assert copy_runs(pool, other, [CopySpan(0, 0, 2), CopySpan(2, 2, 2)], lambda: next(answers)) == 2
    assert numbers(other)[:4] == [0.0, 1.0, 102.0, 103.0]
    other.close()


def test_a_pool_that_does_not_fit_is_refused():
    with pytest.raises(InvalidConfig, match=r"does not fit into the .* free on the GPU"):
        DevicePool.create(LAYOUT, 2**36 // LAYOUT.block_bytes * 64)


def test_what_is_no_announcement_of_it_is_refused(pool):
    ready = pool.announcement()
    assert ready.memory is not None
    with pytest.raises(ProtocolError, match="does not say on which"):
        DevicePool.attach(pool.fd, PoolReady(ready.fingerprint, ready.incarnation, 8))
    with pytest.raises(ProtocolError, match="another layout"):
        DevicePool.attach(pool.fd, PoolReady(b"x" * 32, ready.incarnation, 8, ready.memory))
    elsewhere = DeviceMemory(ready.memory.layout, "another")
    with pytest.raises(DeviceError, match="which this process does not use"):
        DevicePool.attach(pool.fd, PoolReady(ready.fingerprint, ready.incarnation, 8, elsewhere))
    with open(os.devnull) as nothing, pytest.raises(DeviceError):
        DevicePool.attach(nothing.fileno(), ready)
    with pytest.raises(DeviceError):
        DevicePool.attach(pool.fd, PoolReady(ready.fingerprint, ready.incarnation, 2**20, ready.memory))
    assert numbers(pool)[1] == 1.0


def test_closing_twice_is_harmless():
    pool = DevicePool.create(LAYOUT, 1)
    pool.close()
    pool.close()
    assert "closed" in repr(pool)
