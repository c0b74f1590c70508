"""Rows of core/startup.py with a real model: whoever made the pool, the tokens are the same, also after a loss."""

from __future__ import annotations

import os
import signal

import pytest
from engine_rig import Rig
from run_loop import finish

pytest.importorskip("safetensors", reason="a model to load needs pip install -e '.[dev,oracle]'")
from chaos_model import make_model

pytestmark = pytest.mark.usefixtures("child_path")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("tiny")))


async def answer(rig: Rig, name: str) -> list[int]:
    return await rig.answer(name, prompt=40, max_tokens=12)


def test_a_pool_of_the_messenger_gives_the_same_tokens_and_outlives_its_worker(tiny: str):
    """Given blocks: the messenger finds out the layout by itself, before there is a worker. After the loss the next worker
    attaches to the same pool, and the prompt's blocks are found in it."""
    expected: list[int] = []

    async def mixed() -> None:
        async with Rig(model=tiny, blocks=64) as rig:
            expected.extend(await answer(rig, "a"))

    async def split() -> None:
        async with Rig(model=tiny, blocks=64, engine={"role": "decode"}) as rig:
            assert await answer(rig, "a") == expected
            pool = rig.engine._pool.pool
            worker = rig.engine._worker.process.pid
            os.kill(worker, signal.SIGKILL)
            await rig.until(lambda: rig.stats.worker_losses == 1)
            cached = rig.stats.cached_tokens
            assert await answer(rig, "b") == expected
            await rig.until(lambda: rig.stats.cached_tokens > cached)
            assert rig.engine._worker.process.pid != worker
            assert rig.engine._pool.pool == pool

    finish(mixed())
    finish(split())


def test_a_profiled_worker_tells_the_messenger_how_many_blocks_fit(tiny: str):
    async def main() -> None:
        async with Rig(model=tiny, engine={"role": "prefill"}) as rig:
            assert len(await answer(rig, "a")) == 12
            ready = rig.engine._pool.pool
            assert ready.blocks == rig.stats.blocks_total
            assert rig.engine._pool.attached("worker")

    finish(main())
