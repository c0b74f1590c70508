"""A worker of several processes, with real if simple ones: it starts, answers, fails and ends as one worker."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from chaos_server import Process
from engine_rig import Rig
from fake_worker import expected
from run_loop import finish
from test_engine import pinged, until_health_is

from baton.config import TiersConfig
from baton.errors import EngineError
from baton.protocol.control import OrderAnswer, PauseInstance, SleepInstance, WakeInstance
from baton.protocol.request import FinishReason

pytestmark = pytest.mark.usefixtures("child_path")


def of_rank(rank: int, **orders: Any) -> dict[str, Any]:
    """Orders of that rank of the first worker."""
    return {"rank_orders": {str(rank): orders}, "in_epochs": [1]}


def ranks_of(rig: Rig) -> list[Process]:
    return [Process(rank.process.pid) for rank in rig.engine._worker.ranks]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_plan_goes_to_all_ranks_and_one_answer_comes_back(ranks: int):
    async def main() -> None:
        async with Rig(ranks=ranks) as rig:
            assert await rig.answer("a") == expected(5, 12)
            assert await rig.answer("b", prompt=40) == expected(40, 12)
            assert await pinged(rig, 1) == ""
            assert len(ranks_of(rig)) == ranks
            folder = Path(rig.engine.config.worker.rendezvous)
            assert [path.name for path in folder.iterdir()] == ["1"], "a directory of this epoch"
        assert rig.running.exception() is None
        assert not folder.exists()

    finish(main())


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_killed_in_a_step_ends_the_set_and_another_set_goes_on(victim: int):
    """The others wait for it in their collective: they never come back, and are killed."""

    async def main() -> None:
        async with Rig(of_rank(victim, stalls_at=4), ranks=3) as rig:
            rig.ask("a")
            await rig.until(lambda: len(rig.tokens.get("a", ())) == 3)
            first = ranks_of(rig)
            os.kill(first[victim].pid, signal.SIGKILL)
            await rig.until(lambda: "a" in rig.ended)
            assert rig.tokens["a"] == expected(5, 12)
            assert not any(process.alive for process in first)
            await rig.until(lambda: rig.stats.worker_losses == 1)
            assert len(ranks_of(rig)) == 3

    finish(main())


def test_a_rank_stopped_in_a_collective_makes_the_set_stall_and_the_step_limit_ends_it():
    async def main() -> None:
        async with Rig({"in_epochs": [1]}, ranks=2, step_seconds_max=2.0) as rig:
            rig.ask("a", max_tokens=200)
            await rig.until(lambda: len(rig.tokens.get("a", ())) > 3)
            first = ranks_of(rig)
            os.kill(first[1].pid, signal.SIGSTOP)
            await until_health_is(rig, "no progress")
            await rig.until(lambda: "a" in rig.ended)
            assert rig.tokens["a"] == expected(5, 200)
            assert not any(process.alive for process in first)

    finish(main())


@pytest.mark.parametrize("at", ["start", pytest.param("hello", marks=pytest.mark.slow)])
def test_a_rank_killed_during_the_start_ends_it_with_its_name(at: str, tmp_path):
    async def main() -> None:
        rig = Rig(of_rank(1, gate={"at": at, "folder": str(tmp_path)}), ranks=2)
        rig.waits = False
        async with rig:
            await rig.until(lambda: (tmp_path / "reached").exists())
            ranks = ranks_of(rig)
            os.kill(ranks[1].pid, signal.SIGKILL)
            await asyncio.wait([rig.running], timeout=40)
            assert "rank 1 of the worker was killed by SIGKILL before it was ready" in str(rig.running.exception())
            assert not any(process.alive for process in ranks)

    finish(main())


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "what"), [(64, "take its work"), (None, "find out how many KV blocks fit")])
def test_a_rank_that_hangs_in_the_start_ends_it_at_the_one_deadline(tmp_path, blocks: int | None, what: str):
    async def main() -> None:
        hangs = of_rank(1, gate={"at": "hello", "folder": str(tmp_path)})
        rig = Rig(hangs, ranks=2, blocks=blocks, worker_start_seconds_max=8.0)
        rig.waits = False
        async with rig:
            await rig.until(lambda: rig.engine._worker is not None)
            ranks = ranks_of(rig)
            await asyncio.wait([rig.running], timeout=40)
            error = str(rig.running.exception())
            assert "not ready within 8 s" in error
            assert f"waited for rank 1 of the worker to {what}" in error
            assert not any(process.alive for process in ranks)

    finish(main())


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_restart_is_named(tmp_path, caplog):
    orders = {"gate": {"at": "hello", "folder": str(tmp_path)}}

    async def main() -> None:
        async with Rig({"rank_orders": {"1": orders}, "in_epochs": [2]}, ranks=2, worker_start_seconds_max=8.0) as rig:
            os.kill(ranks_of(rig)[0].pid, signal.SIGKILL)
            await rig.until(lambda: rig.stats.worker_losses == 2)
            assert await rig.answer("a") == expected(5, 12), "the third life has no such order"
            assert "starting another worker (not ready in time: waited for rank 1 of the worker)" in caplog.text

    finish(main())


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        ({"blocks": 60}, "rank 1 has another number of KV blocks than rank 0: 60 instead of 64"),
        pytest.param({"context_tokens": 9}, "rank 1 has another context_tokens", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_has_loaded_something_else_ends_the_start_with_its_name(hello: dict[str, Any], words: str):
    async def main() -> None:
        rig = Rig({"rank_orders": {"1": {"hello": hello}}}, ranks=2)
        rig.waits = False
        async with rig:
            await asyncio.wait([rig.running], timeout=40)
            assert words in str(rig.running.exception())
            assert isinstance(rig.running.exception(), EngineError)

    finish(main())


def test_a_rank_that_computes_something_else_ends_the_set():
    """Noticed one step late at most, and as a broken protocol: its pool is not trusted any more."""

    async def main() -> None:
        async with Rig(of_rank(1, another_at=6), ranks=2) as rig:
            assert await rig.answer("a", max_tokens=60) == expected(5, 60)
            await rig.until(lambda: rig.stats.worker_losses == 1)
            assert rig.ended["a"].reason is FinishReason.LENGTH

    finish(main())


def test_an_idle_set_is_healthy_only_if_its_last_rank_answers():
    async def main() -> None:
        async with Rig(ranks=2) as rig:
            await rig.answer("a")
            await rig.until(lambda: not rig.engine._instance.in_flight)  # a ping of a busy one is answered by its progress
            rig.engine._worker.ranks[1].process.send_signal(signal.SIGSTOP)
            assert await pinged(rig, 2) != ""
            rig.engine._worker.ranks[1].process.send_signal(signal.SIGCONT)
            await until_health_is(rig, "")

    finish(main())


def test_all_ranks_sleep_and_wake():
    async def main() -> None:
        async with Rig(ranks=2) as rig:
            await rig.answer("a")
            first = ranks_of(rig)
            for order in (PauseInstance(1), SleepInstance(2)):
                rig.front.send(order)
                await rig.until(lambda: rig.messages[-1:] and any(type(m) is OrderAnswer for m in rig.messages))
            await rig.until(lambda: OrderAnswer(2, "done") in rig.messages)
            assert not any(process.alive for process in first)
            rig.front.send(WakeInstance(3))
            await rig.until(lambda: OrderAnswer(3, "done") in rig.messages)
            assert len({process.pid for process in [*first, *ranks_of(rig)]}) == 4

    finish(main())


PROCESSES = {
    "tiers": {"tiers": TiersConfig(kv_host_gib=0.001)},
    "decode": {"role": "decode"},
    "prefill tiers": {"role": "prefill", "tiers": TiersConfig(kv_host_gib=0.001)},
}


@pytest.mark.parametrize("row", ["tiers", "decode", pytest.param("prefill tiers", marks=pytest.mark.slow)])
@pytest.mark.parametrize("blocks", [None, pytest.param(48, marks=pytest.mark.slow)])
def test_each_rank_has_a_pool_that_its_own_cache_service_maps(row: str, blocks: int | None):
    async def main() -> None:
        async with Rig(ranks=2, engine=PROCESSES[row], blocks=blocks) as rig:
            assert await rig.answer("a") == expected(5, 12)
            children = [rig.engine._children.get(name) for name in ("worker", "cache")]
            pools = [[mapped(rank.process.pid) for rank in child.ranks] for child in children]
            assert pools[0] == pools[1], "the same memory"
            assert [len(each) for each in pools[0]] == [1, 1]
            assert pools[0][0] != pools[0][1], "each rank has its own"
            assert rig.engine._pool.attached("worker" if "mixed" not in row and row != "tiers" else "cache")

    finish(main())


def mapped(pid: int) -> set[str]:
    """Inodes of the KV pools that the process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:baton-kv" in line}
