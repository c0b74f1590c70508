"""Ranks with a real model: the tokens are those of one rank, also after a rank was killed or stopped."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from engine_rig import Rig
from run_loop import finish

from baton.config import TiersConfig

pytest.importorskip("safetensors", reason="a model to load needs pip install -e '.[dev,oracle]'")
from chaos_model import make_model

pytestmark = pytest.mark.usefixtures("child_path")

EXACT = {"quantization": "none", "kv_dtype": "float32"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("tiny")))


def answers(rig: Rig) -> list[int]:
    """The tokens of an undisturbed run."""
    found: list[int] = []

    async def main() -> None:
        async with rig:
            found.extend(await rig.answer("a", prompt=40, max_tokens=60))

    finish(main())
    return found


@pytest.fixture(scope="module")
def expected(tiny: str) -> list[int]:
    return answers(Rig(model=tiny, blocks=64, worker=EXACT))


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_killed_in_a_step_changes_no_token(tiny: str, expected: list[int], victim: int):
    async def main() -> None:
        async with Rig(model=tiny, blocks=64, ranks=2, worker=EXACT) as rig:
            assert await rig.answer("a", prompt=40, max_tokens=60) == expected
            rig.ask("b", prompt=40, max_tokens=60)
            await rig.until(lambda: len(rig.tokens.get("b", ())) > 5)
            os.kill(rig.engine._worker.ranks[victim].process.pid, signal.SIGKILL)
            await rig.until(lambda: "b" in rig.ended)
            assert rig.tokens["b"] == expected
            await rig.until(lambda: rig.stats.worker_losses == 1)

    finish(main())


def test_a_rank_of_the_cache_killed_while_it_copies_changes_no_token(tiny: str, expected: list[int]):
    """Rank 0 has copied its parts to host memory, and rank 1 has not: none of these blocks may be found there."""

    async def main() -> None:
        rig = Rig(model=tiny, blocks=64, ranks=2, worker=EXACT, engine={"tiers": TiersConfig(kv_host_gib=0.001)})
        async with rig:
            tiers = rig.engine._instance.board.tiers
            await rig.until(lambda: tiers.up)
            services = rig.engine._children.get("cache").ranks
            os.kill(services[1].process.pid, signal.SIGSTOP)
            assert await rig.answer("a", prompt=40, max_tokens=60) == expected
            await rig.until(lambda: bool(tiers._moves))
            os.kill(services[1].process.pid, signal.SIGKILL)
            await rig.until(lambda: rig.engine._children.get("cache") not in (None, services[0].whole))
            await rig.until(lambda: rig.engine._pool.attached("cache"))
            assert await rig.answer("b", prompt=40, max_tokens=60) == expected
            assert not any(has_process(rank.process.pid) for rank in services)
            assert rig.stats.worker_losses == 0

    finish(main())


def has_process(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"compute": "torch", **EXACT}])
def test_a_rank_stopped_in_a_step_is_replaced_and_changes_no_token(tiny: str, settings: dict[str, Any]):
    before = answers(Rig(model=tiny, blocks=64, ranks=2, worker=settings))

    async def main() -> None:
        async with Rig(model=tiny, blocks=64, ranks=2, worker=settings, step_seconds_max=2.0) as rig:
            rig.ask("b", prompt=40, max_tokens=60)
            await rig.until(lambda: len(rig.tokens.get("b", ())) > 5)
            os.kill(rig.engine._worker.ranks[1].process.pid, signal.SIGSTOP)
            await rig.until(lambda: "b" in rig.ended)
            assert rig.tokens["b"] == before

    finish(main())
