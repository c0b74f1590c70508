"""The KV pool on a GPU: opened by another process, copied to and from the host tier, and between two pools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not (Path("/dev/nvidia0").exists() and torch.cuda.is_available()):
    pytest.skip("no GPU here", allow_module_level=True)

import numpy as np  # noqa: E402

from baton.errors import DeviceError, InvalidConfig, ProtocolError  # noqa: E402
from baton.kvpool.copies import Run, copy_runs, tier_copies  # noqa: E402
from baton.kvpool.device_pool import DevicePool  # noqa: E402
from baton.kvpool.layout import KVLayout  # noqa: E402
from baton.kvpool.pool import KVPool  # noqa: E402
from baton.protocol.codec import encode  # noqa: E402
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


CHILD = """
import sys
from baton.kvpool.copies import Run, copy_runs
from baton.kvpool.device_pool import DevicePool
from baton.protocol.codec import decode
theirs = DevicePool.attach(decode(bytes.fromhex(sys.argv[1])))
ours = DevicePool.create(theirs.layout, 8)
assert copy_runs(theirs, ours, [Run(2, 0, 3), Run(7, 5, 1)], lambda: True) == 4
assert copy_runs(ours, theirs, [Run(0, 0, 1), Run(5, 1, 1)], lambda: True) == 2
assert "torch" not in sys.modules
ours.close()
theirs.close()
"""


def test_another_process_opens_it_without_torch(pool):
    content = encode(pool.announcement()).hex()
    subprocess.run([sys.executable, "-c", CHILD, content], check=True, timeout=DEADLINE_SECONDS)
    assert numbers(pool) == [2.0, 7.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


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
    assert copy_runs(pool, other, [Run(0, 0, 2), Run(2, 2, 2)], lambda: next(answers)) == 2
    assert numbers(other)[:4] == [0.0, 1.0, 102.0, 103.0]
    other.close()


def test_a_pool_that_does_not_fit_is_refused():
    with pytest.raises(InvalidConfig, match=r"does not fit into the .* free on the GPU"):
        DevicePool.create(LAYOUT, 2**36 // LAYOUT.block_bytes * 64)


def test_what_is_no_announcement_of_it_is_refused(pool):
    ready = pool.announcement()
    with pytest.raises(ProtocolError, match="no handle"):
        DevicePool.attach(PoolReady(ready.fingerprint, ready.incarnation, 8))
    assert ready.memory is not None
    with pytest.raises(ProtocolError, match="another layout"):
        DevicePool.attach(PoolReady(b"x" * 32, ready.incarnation, 8, ready.memory))
    with pytest.raises(DeviceError):
        DevicePool.attach(PoolReady(ready.fingerprint, ready.incarnation, 8, DeviceMemory(bytes(64), ready.memory.layout)))


def test_closing_twice_is_harmless():
    pool = DevicePool.create(LAYOUT, 1)
    pool.close()
    pool.close()
    assert "closed" in repr(pool)
