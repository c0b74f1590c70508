"""The eight rows of core/startup.py with real processes: who is there, whose pool it is, and what a loss leaves of it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chaos_server import Process, until
from engine_rig import Rig
from fake_worker import expected
from run_loop import finish

from baton.config import KVConfig, TiersConfig
from baton.core.startup import plan_startup
from baton.errors import EngineError, PeerError, Unavailable
from baton.protocol.ids import HostBlockId, MoveId
from baton.protocol.moves import BlockMove
from baton.runtime.engine.startup import Startup
from baton.runtime.processes.child import Child, RankSet

pytestmark = pytest.mark.usefixtures("child_path")

TIERS = TiersConfig(kv_host_gib=0.001)
ROWS = {
    "profiled mixed tiers": (None, {"tiers": TIERS}),
    "profiled mixed": (None, {}),
    "profiled prefill tiers": (None, {"role": "prefill", "tiers": TIERS}),
    "profiled decode": (None, {"role": "decode"}),
    "given mixed tiers": (48, {"tiers": TIERS}),
    "given mixed": (48, {}),
    "given prefill tiers": (48, {"role": "prefill", "tiers": TIERS}),
    "given decode": (48, {"role": "decode"}),
}


def rig_of(row: str, orders: dict[str, Any] | None = None, **scheduler: Any) -> Rig:
    blocks, engine = ROWS[row]
    return Rig(orders, blocks=blocks, engine=engine, **scheduler)


def names(rig: Rig) -> list[str]:
    return [name for name in ("worker", "cache") if rig.engine._children.get(name) is not None]


def pid(rig: Rig, name: str) -> int:
    child = rig.engine._children.get(name)
    assert child is not None
    return child.process.pid


def pools(process: int) -> int:
    """How many KV pools that process has mapped."""
    maps = Path(f"/proc/{process}/maps").read_text().splitlines()
    return sum("memfd:baton-kv" in line for line in maps)


async def require_carried_out(row: str) -> None:
    async with rig_of(row) as rig:
        assert await rig.answer("a") == expected(5, 12)
        assert rig.stats.blocks_total == (ROWS[row][0] or 64)
        pool = rig.engine._pool
        if row in ("profiled mixed", "given mixed"):
            assert names(rig) == ["worker"]
            assert pool.pool is None, "nobody attaches, so the engine has no descriptor of it"
            return
        assert names(rig) == ["worker", "cache"]
        attacher = "cache" if "mixed" in row else "worker"
        assert pool.attached(attacher)
        assert [pools(pid(rig, name)) for name in ("worker", "cache")] == [1, 1]
        assert pools(os.getpid()) == 0, "the engine has the descriptor and never maps it"


AFTER_A_KILL = {"profiled mixed", "given mixed tiers", "profiled prefill tiers"}
"""Rows that are carried out in the second starts of test_any_child_killed_in_any_phase... as well."""


@pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.slow) if row in AFTER_A_KILL else row for row in ROWS])
def test_a_row_is_carried_out(row: str):
    finish(require_carried_out(row))


def test_without_prefix_caching_tiers_are_not_used():
    async def main() -> None:
        async with Rig(engine={"tiers": TIERS}, kv=KVConfig(prefix_caching=False)) as rig:
            assert names(rig) == ["worker"]

    finish(main())


def test_a_pool_of_the_messenger_outlives_worker_and_messenger():
    """The engine has its descriptor: the next worker attaches to the same pool, and so does the next messenger."""

    async def main() -> None:
        async with rig_of("given decode") as rig:
            first = rig.engine._pool.pool
            worker, cache = pid(rig, "worker"), pid(rig, "cache")
            os.kill(worker, signal.SIGKILL)
            await rig.until(lambda: names(rig) == ["worker", "cache"] and pid(rig, "worker") != worker)
            assert await rig.answer("a") == expected(5, 12)
            assert rig.engine._instance.board.pool.is_still(first.incarnation), "the core knows that the pool was kept"
            os.kill(cache, signal.SIGKILL)
            await rig.until(lambda: names(rig) == ["worker", "cache"] and pid(rig, "cache") != cache)
            await rig.until(lambda: pools(pid(rig, "cache")) == 1)
            assert rig.engine._pool.pool == first
            assert await rig.answer("b") == expected(5, 12)
            assert rig.stats.worker_losses == 1

    finish(main())


def test_a_pool_of_the_worker_ends_with_it_and_is_unmapped_before_the_next():
    async def main() -> None:
        async with rig_of("profiled mixed tiers") as rig:
            first, worker, cache = rig.engine._pool.pool, pid(rig, "worker"), pid(rig, "cache")
            rig.ask("a", max_tokens=100)
            await rig.until(lambda: len(rig.tokens.get("a", ())) > 3)
            os.kill(worker, signal.SIGKILL)
            await rig.until(lambda: "a" in rig.ended)
            assert rig.tokens["a"] == expected(5, 100)
            await rig.until(lambda: rig.engine._pool.attached("cache"))
            assert pid(rig, "cache") == cache
            assert rig.engine._pool.pool.incarnation != first.incarnation
            assert [pools(pid(rig, name)) for name in ("worker", "cache")] == [1, 1]

    finish(main())


def test_an_attacher_that_does_not_let_go_of_a_pool_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("baton.runtime.engine.pool_registry.DETACH_SECONDS", 0.3)

    async def main() -> None:
        async with rig_of("given mixed tiers", {"cache": {"gate": {"at": "detach", "folder": str(tmp_path)}}}) as rig:
            cache = Process(pid(rig, "cache"))
            os.kill(pid(rig, "worker"), signal.SIGKILL)
            await rig.until(lambda: not cache.alive)
            await rig.until(lambda: rig.engine._pool.attached("cache"))
            assert await rig.answer("a") == expected(5, 12)

    finish(main())


def test_a_lost_cache_service_costs_no_request():
    async def main() -> None:
        async with rig_of("given mixed tiers") as rig:
            for loss in range(3):
                await rig.until(lambda: rig.engine._pool.attached("cache"))
                rig.ask(f"r{loss}", max_tokens=150)
                os.kill(pid(rig, "cache"), signal.SIGKILL)
                await rig.until(lambda: not rig.engine._pool.attached("cache"))
                await rig.until(lambda loss=loss: f"r{loss}" in rig.ended)
                assert rig.tokens[f"r{loss}"] == expected(5, 150)
            await rig.until(lambda: rig.engine._pool.attached("cache"))
            assert rig.stats.worker_losses == 0

    finish(main())


async def started_until(rig: Rig, reached: Path) -> None:
    """Begin the start, and come back when a process stands at its gate."""
    rig.waits = False
    await rig.__aenter__()
    await rig.until(reached.exists)


PHASES = [
    ("profiled mixed", "hello", "worker", "worker"),
    ("given mixed tiers", "attach", "cache", "worker"),
    ("profiled prefill tiers", "create", "cache", "cache"),
]
"""Row, the place in which a process stands still, which one that is, and which one is killed then."""
MORE_PHASES = [
    ("given mixed tiers", "attach", "cache", "cache"),
    ("profiled mixed", "start", "worker", "worker"),
    ("given mixed tiers", "start", "worker", "worker"),
    ("given mixed tiers", "start", "cache", "worker"),
    ("given mixed tiers", "start", "cache", "cache"),
    ("profiled prefill tiers", "start", "worker", "worker"),
    ("profiled prefill tiers", "create", "cache", "worker"),
    ("given decode", "create", "cache", "cache"),
    ("given decode", "start", "worker", "worker"),
    ("given decode", "start", "worker", "cache"),
    ("given decode", "hello", "worker", "worker"),
    ("given decode", "hello", "worker", "cache"),
]
"""With these it is every child in every phase: `make chaos`."""
if os.environ.get("BATON_EVERY_PHASE"):
    PHASES += MORE_PHASES


@pytest.mark.parametrize(("row", "place", "gated", "victim"), PHASES)
def test_any_child_killed_in_any_phase_ends_the_start_and_the_next_start_is_clean(
    row: str, place: str, gated: str, victim: str, tmp_path: Path
):
    order = {"gate": {"at": place, "folder": str(tmp_path)}}

    async def main() -> None:
        rig = rig_of(row, order if gated == "worker" else {"cache": order})
        await started_until(rig, tmp_path / "reached")
        processes = [Process(pid(rig, name)) for name in names(rig)]
        os.kill(pid(rig, victim), signal.SIGKILL)
        with pytest.raises(EngineError, match=f"the {victim} process was killed by SIGKILL before it was ready"):
            await asyncio.wait_for(rig.running, 30)
        await rig.__aexit__()
        for process in processes:
            until(lambda process=process: not process.alive, "a process is left", 20)
        await require_carried_out(row)

    finish(main())


def test_every_wait_has_a_deadline_and_says_what_it_was_for():
    """One step after the other is reached, and each time the start ends there."""
    steps = [
        ("size", "worker", "the worker to find out how many KV blocks fit"),
        ("create", "cache", "the cache to make the KV pool"),
        ("attach", "worker", "the worker to attach to the KV pool"),
        ("ready", "worker", "the worker to take its work"),
        ("ready", "cache", "the cache to take its work"),
    ]

    class NoChildren:
        async def start(self, name: str) -> None:
            pass

        def get(self, name: str) -> None:
            return None

    async def main() -> None:
        plan = plan_startup(blocks_given=False, role="prefill", tiers=False)
        for reached, (_, _, words) in enumerate(steps):
            startup = Startup(plan, NoChildren(), None, 0.01)
            for milestone, process, _ in steps[:reached]:
                startup.reach(milestone, process)
            with pytest.raises(Unavailable, match=rf"not ready within 0\.01 s \(start_seconds_max\): waited for {words}"):
                await startup.run()

    finish(main())


def rank_set(name: str, ranks: int) -> RankSet:
    row: Any = SimpleNamespace(name=name)
    nothing: Any = None
    return RankSet(row, 1, [Child(row, 1, nothing, nothing, None, nothing, rank) for rank in range(ranks)], nothing)


@pytest.mark.parametrize(("late", "words"), [((1,), "rank 1"), ((0, 2), "ranks 0 and 2"), ((0, 1, 2), "ranks 0, 1 and 2")])
def test_ranks_that_hold_up_a_start_are_named(late: tuple[int, ...], words: str):
    async def main() -> None:
        worker = rank_set("worker", 3)

        class Started:
            async def start(self, name: str) -> None: ...

            def get(self, name: str) -> RankSet:
                return worker

        for rank in worker.ranks:
            rank.reached.update(["size"] if rank.rank in late else ["size", "ready"])
        startup = Startup(plan_startup(blocks_given=True, role="mixed", tiers=False), Started(), 8, 0.01, 3)  # type: ignore[arg-type]
        with pytest.raises(Unavailable, match=f"waited for {words} of the worker to take its work"):
            await startup.run()

    finish(main())


def test_a_start_that_takes_too_long_leaves_nothing(tmp_path: Path):
    async def main() -> None:
        rig = rig_of(
            "given decode", {"cache": {"gate": {"at": "create", "folder": str(tmp_path)}}}, worker_start_seconds_max=1.0
        )
        rig.waits = False
        async with rig:
            with pytest.raises(Unavailable, match="waited for the cache to make the KV pool"):
                await asyncio.wait_for(rig.running, 30)

    finish(main())


def test_a_cache_service_that_cannot_start_says_why():
    async def main() -> None:
        rig = rig_of("given mixed tiers", {"cache": {"fails": "attach"}})
        rig.waits = False
        async with rig:
            with pytest.raises(EngineError, match="the cache service cannot attach"):
                await asyncio.wait_for(rig.running, 30)

    finish(main())


def test_an_error_in_a_thread_of_the_cache_service_is_loud():
    """It used to vanish: no result came, and whoever waited for it waited for ever."""

    async def check() -> None:
        async with rig_of("given mixed tiers") as rig:
            await rig.until(lambda: rig.engine._instance.board.tiers.up)
            cache = rig.engine._children.get("cache")
            no_storage = BlockMove(MoveId(1), "put", (HostBlockId(0),), keys=(bytes(32),))
            cache.control.send(no_storage)
            process = Process(cache.process.pid)
            await rig.until(lambda: not process.alive)
            await rig.until(lambda: names(rig) == ["worker", "cache"] and pid(rig, "cache") != process.pid)
            await rig.until(lambda: rig.engine._instance.board.tiers.up)
            assert await rig.answer("next")

    finish(check())


def test_a_move_before_the_tiers_are_there_is_loud(tmp_path: Path):
    """It was dropped without a word, and whoever waited for its result waited for ever."""

    async def check() -> None:
        async with rig_of("given mixed tiers", {"cache": {"gate": {"at": "tiers", "folder": str(tmp_path)}}}) as rig:
            await rig.until((tmp_path / "reached").exists)
            cache = rig.engine._children.get("cache")
            cache.control.send(BlockMove(MoveId(1), "put", (HostBlockId(0),), keys=(bytes(32),)))
            await rig.until(lambda: cache.last_words == "a BlockMove came before the tiers were there")
            (tmp_path / "open").touch()
            await rig.until(lambda: rig.engine._instance.board.tiers.up)
            assert pid(rig, "cache") != cache.process.pid
            assert await rig.answer("next")

    finish(check())


def test_a_pool_announced_by_one_who_may_not_is_refused():
    async def main() -> None:
        async with rig_of("given mixed tiers") as rig:
            pool, cache = rig.engine._pool, rig.engine._children.get("cache")
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(PeerError, match="the cache has announced a KV pool, which is the worker's to make"):
                pool.on_announced(cache, pool.pool, os.dup(0))
            assert len(os.listdir("/proc/self/fd")) == before, "its descriptor is kept"

    finish(main())
