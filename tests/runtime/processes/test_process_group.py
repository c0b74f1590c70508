"""What `baton serve` remembers for the next engine, and how it is told to stop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from run_loop import finish

from baton.config import EngineConfig, RouterConfig, ServeConfig, WorkerConfig
from baton.config.router_process import RouterProcessConfig
from baton.errors import Unavailable
from baton.protocol.control import InstanceReady, LoadProgress, ModelChanged
from baton.runtime.processes import process_group
from baton.runtime.processes.process_table import SUPERVISOR_CHILDREN
from baton.runtime.supervisor import Supervisor
from baton.runtime.up import UpConfig, UpGroup, UpReporter, start_after

READY = InstanceReady(8, 16, 4, 300, 512)


def child(name: str) -> Any:
    return SimpleNamespace(name=name, mark_ready=lambda: None)


def test_another_engine_begins_with_the_weights_that_were_loaded_last():
    """Else it would go on with answers that other weights have begun."""

    async def main() -> None:
        supervisor = Supervisor(ServeConfig(model="/old"))
        supervisor.on_message(child("engine"), ModelChanged("/new", b"new"))
        engine = SUPERVISOR_CHILDREN[0].config(supervisor._config, 2)
        assert engine.worker.model == "/new"

    finish(main())


def test_it_is_ready_when_all_are_and_says_so_once():
    async def main() -> None:
        told: list[Any] = []
        supervisor = Supervisor(ServeConfig(model="/m"), told.append, told.append)
        supervisor.on_message(child("engine"), LoadProgress(1, 2))
        supervisor.on_message(child("engine"), READY)
        assert told == [LoadProgress(1, 2)]
        for name in ("front", "engine", "front"):
            supervisor.on_message(child(name), READY)
        assert told == [LoadProgress(1, 2), READY]

    finish(main())


def test_the_second_signal_is_in_a_hurry():
    async def main() -> None:
        supervisor = Supervisor(ServeConfig(model="/m"))
        supervisor.stop()
        assert (supervisor._stop.is_set(), supervisor._hurry) == (True, False)
        for _ in range(2):
            supervisor.stop()
            assert supervisor._hurry

    finish(main())


def test_a_start_has_a_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_group, "START_SECONDS_MORE", 0.01)

    async def main() -> None:
        supervisor = Supervisor(ServeConfig(model="/m"))
        supervisor._start_seconds_max = 0.0
        with pytest.raises(Unavailable, match=r"nothing was ready within 0\.01 s"):
            await asyncio.wait_for(supervisor._start_in_time(), 20)
        assert supervisor.start_is_over()
        await asyncio.wait_for(supervisor._start_in_time(), 20)

    finish(main())


# Instances that share a GPU


def on_gpu(index: int, sharers: int = 2, **settings: Any) -> EngineConfig:
    return EngineConfig(worker=WorkerConfig(device="cuda", device_index=index, device_sharers=sharers, **settings))


def test_instances_that_measure_one_gpu_are_started_one_after_the_other():
    engines = {"a": on_gpu(0), "b": on_gpu(1), "c": on_gpu(0), "d": on_gpu(0), "e": on_gpu(1, blocks=7), "f": on_gpu(2, 1)}
    expected = {"a": [], "b": [], "c": ["a"], "d": ["a", "c"], "e": [], "f": [], "router": []}
    assert {name: start_after(name, engines) for name in expected} == expected
    given = {"a": on_gpu(0, kv_memory_gib=1.0), "b": on_gpu(0, kv_memory_gib=1.0)}
    assert start_after("b", given) == [], "nothing is measured"


class Started:
    """Stands for the children: who was started, in which order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def start(self, name: str) -> None:
        self.names.append(name)

    async def end(self, hurried: Any) -> None:
        self.names.append("end")

    def process_ids(self) -> list[int]:
        return []


def up_group(**engines: EngineConfig) -> tuple[UpGroup, Started]:
    serve = ServeConfig(model="/m")
    router = RouterProcessConfig(serve=serve, router=RouterConfig(), listen="unix:/nowhere", cluster_secret="/nowhere")
    group, started = UpGroup(UpConfig(router=router, engines=engines), UpReporter()), Started()
    group._children = started  # type: ignore[assignment]
    return group, started


def test_the_next_one_is_started_when_the_one_before_is_ready_and_has_as_many_blocks_in_its_next_life():
    """Found on an H200: two that measured at the same time did not see each other's memory."""

    async def main() -> None:
        group, started = up_group(a=on_gpu(0), b=on_gpu(0), c=on_gpu(1, 1))
        running = asyncio.create_task(group.run())
        await asyncio.sleep(0.02)
        assert started.names == ["a"]
        group.on_message(child("a"), READY)
        await asyncio.sleep(0.02)
        assert started.names == ["a", "b", "c", "router"]
        assert [engine.worker.blocks for engine in group._config.engines.values()] == [READY.blocks, None, None]
        group.on_message(child("c"), READY)
        assert group._config.engines["c"].worker.blocks is None, "alone on its GPU it may measure again"
        group.stop()
        await running

    finish(main())


def test_a_start_that_waits_for_an_instance_can_be_stopped():
    async def main() -> None:
        group, started = up_group(a=on_gpu(0), b=on_gpu(0))
        running = asyncio.create_task(group.run())
        await asyncio.sleep(0.02)
        group.stop()
        await running
        assert started.names == ["a", "end"]

    finish(main())
