"""An engine whose worker is two ranks on one GPU: sized by measuring, recorded, killed, and with the tokens of one rank.

The command line refuses two ranks on one GPU; CUDA_VISIBLE_DEVICES that names it twice gives it to both.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
sys.path.append(str(TESTS / "runtime"))

from chaos_server import python_path  # noqa: E402
from engine_rig import Rig  # noqa: E402
from run_loop import finish  # noqa: E402

from baton.protocol.control import InstanceReady  # noqa: E402

SETTINGS = {"device": "cuda", "dtype": "float32", "deterministic": True, "memory_utilization": 0.2}


class GpuRig(Rig):
    """Kernels are compiled at the first start: its limits are longer."""

    def __init__(self, model: Path, ranks: int) -> None:
        super().__init__(model=str(model), ranks=ranks, worker=SETTINGS, worker_start_seconds_max=200.0)
        self.waits = False

    async def until(self, question: Callable[[], bool]) -> None:
        async with asyncio.timeout(200):
            while not question():
                assert not self.running.done() or not self.running.exception(), self.running.exception()
                self._note_worker()
                await asyncio.sleep(0.01)


@pytest.mark.timeout(500)
def test_two_ranks_on_one_gpu_give_the_tokens_of_one_also_after_a_rank_was_killed(tiny, monkeypatch):
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{gpu},{gpu}")
    monkeypatch.setenv("PYTHONPATH", python_path(TESTS / "runtime"))
    found: list[list[int]] = []
    plans: list[dict[str, int | float | str]] = []

    async def main() -> None:
        for ranks in (1, 2):
            async with GpuRig(tiny, ranks) as rig:
                await rig.until(lambda rig=rig: rig.saw(InstanceReady))
                plans.append(next(message.plan for message in rig.messages if type(message) is InstanceReady))
                found.append(await rig.answer("a", prompt=40, max_tokens=60))
                if ranks == 1:
                    continue
                rig.ask("b", prompt=40, max_tokens=60)
                await rig.until(lambda rig=rig: len(rig.tokens.get("b", ())) > 5)
                os.kill(rig.engine._worker.ranks[1].process.pid, signal.SIGKILL)
                await rig.until(lambda rig=rig: "b" in rig.ended)
                found.append(rig.tokens["b"])
                await rig.until(lambda rig=rig: rig.stats.worker_losses == 1)

    finish(main())
    assert len(found[0]) == 60
    assert found[1:] == found[:1] * 2
    assert {plan["kv_blocks_by"] for plan in plans} == {"gpu_memory_utilization"}
