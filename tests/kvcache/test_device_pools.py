"""Pools on a GPU are read by other instances: mapped where both use one GPU, else over TCP by way of pinned memory.

On a machine with a GPU with NVIDIA's driver, elsewhere with one of paper (tests/kvpool/fake_cuda.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from messenger_rig import Rig, finish

from baton.kvcache import tcp_session
from baton.kvpool import cuda_driver
from baton.kvpool.block_bytes import ByWayOfHost
from baton.kvpool.device_pool import DevicePool
from baton.kvpool.layout import KVLayout

sys.path.append(str(Path(__file__).parents[1] / "kvpool"))
import fake_cuda

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=16, block_size=4, dtype="bfloat16", format="token-major")
BLOCKS = 24

pytestmark = pytest.mark.usefixtures("driver", "no_descriptor_is_kept")  # the driver opens its own descriptors first


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/nvidia0").exists():
        monkeypatch.setattr(cuda_driver, "_library", cuda_driver._library)  # puts it back afterwards
        fake_cuda.install()
    first = DevicePool.create(LAYOUT, 1)  # descriptors that the driver keeps are open from here on
    first.close()


def content_of(pool: DevicePool) -> np.ndarray:
    """Block by block."""
    way, found = ByWayOfHost(pool, pool.blocks), bytearray(pool.nbytes)
    way.read([(0, pool.blocks)], lambda nbytes: memoryview(found)[:nbytes])
    way.close()
    return np.frombuffer(found, np.uint8).reshape(pool.blocks, -1)


def filled_pool(seed: int) -> DevicePool:
    pool = DevicePool.create(LAYOUT, BLOCKS)
    content = np.random.default_rng(seed).integers(0, 256, pool.nbytes, np.uint8).tobytes()
    way = ByWayOfHost(pool, BLOCKS)
    way.write([(0, BLOCKS)], [memoryview(content)])
    way.close()
    return pool


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("piece_bytes", [1, 3 * LAYOUT.block_bytes, 1 << 20])
def test_blocks_arrive_whatever_the_way(driver, kind: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tcp_session, "PIECE_BYTES", piece_bytes)

    async def main() -> None:
        async with Rig(kind) as rig:
            rig.device.close()
            rig.device = filled_pool(1)
            rig.messenger.attach(rig.device)
            peer = rig.serve(pool=filled_pool(2))
            expected = content_of(rig.device).copy()
            chance = np.random.default_rng(3)
            for _ in range(8):
                count = int(chance.integers(1, BLOCKS))
                sources, targets = (chance.permutation(BLOCKS)[:count].tolist() for _ in range(2))
                result = await rig.pull(peer, sources, targets)
                assert (result.moved, result.error) == (count, None)
                expected[targets] = content_of(peer.pool)[sources]
                assert np.array_equal(content_of(rig.device), expected)

    finish(main())


def test_a_pool_on_another_gpu_is_not_mapped_and_the_reason_says_which(monkeypatch: pytest.MonkeyPatch):
    """The next address of the peer, TCP, is tried then (peers.py)."""
    monkeypatch.setattr(cuda_driver, "_library", cuda_driver._library)
    fake = fake_cuda.install(gpus=(0, 1))

    async def main() -> None:
        async with Rig() as rig:
            rig.device.close()
            rig.device = DevicePool.create(LAYOUT, BLOCKS)
            rig.messenger.attach(rig.device)
            peer = rig.serve(pool=DevicePool.create(LAYOUT, BLOCKS, 1))
            fake.gpus = (0,)  # what the reader sees
            result = await rig.pull(peer, [0], [0])
            fake.gpus = (0, 1)
            assert "which this process does not use" in str(result.error)

    finish(main())
