"""What `baton serve` remembers for the next engine, and how it is told to stop."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from chaos_model import make_model
from chaos_server import ask, free_port
from run_loop import finish

from baton.config import EngineConfig, RouterConfig, ServeConfig, WorkerConfig
from baton.config.router_process import RouterProcessConfig
from baton.errors import Unavailable
from baton.protocol.control import InstanceReady, LoadProgress, ModelChanged
from baton.protocol.instance import ClusterView, RefusedView, RouterListening
from baton.runtime.processes import process_group
from baton.runtime.processes.child import Child
from baton.runtime.processes.private_folder import PREFIX
from baton.runtime.processes.process_table import SUPERVISOR_CHILDREN
from baton.runtime.supervisor import Supervisor
from baton.runtime.up import UpConfig, UpGroup, UpReporter, start_after, up_children
from baton.trust.secret import create_secret

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


class Leaves(Started):
    """A child that is killed in the end."""

    def __init__(self, parent: Path) -> None:
        super().__init__()
        self._parent = parent

    async def end(self, hurried: Any) -> None:
        (self._parent / f"{PREFIX}killed" / "1").mkdir(parents=True)


def test_a_directory_that_a_killed_child_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Found by an audit: after the second SIGTERM that of the engine stayed, until the next server started."""
    monkeypatch.setattr(process_group, "usual_parent", lambda: tmp_path)

    async def main() -> None:
        group, _ = up_group(a=on_gpu(0))
        group._children = Leaves(tmp_path)  # type: ignore[assignment]
        group.stop()
        await group.run()

    finish(main())
    assert not list(tmp_path.iterdir())


# A router alone


class Heard(UpReporter):
    def __init__(self) -> None:
        self.lost: list[str] = []
        self.ready = 0
        self.stops_first = False
        "Whether to stop the first router when it listens."
        self.again = asyncio.Event()
        "The router has been lost, and another one listens."

    def on_lost(self, name: str, why: str) -> None:
        self.lost.append(why)

    def on_ready(self, ready: InstanceReady) -> None:
        self.ready += 1


class StartedToo(Started):
    def start_is_over(self) -> None:
        self.names.append("over")


def test_a_router_alone_has_started_when_it_listens_and_is_ready_with_its_first_instance():
    """Its start lasted until an instance had joined: hours, in which a loss of the router was the end."""

    async def main() -> None:
        for engines, over in (({}, ["over"]), ({"a": on_gpu(0)}, [])):
            group, _ = up_group(**engines)
            group._children = started = StartedToo()  # type: ignore[assignment]
            group._reporter = heard = Heard()
            view = ClusterView("r", "serving")
            for message in (RouterListening(), view):
                group.on_message(child("router"), message)
            assert (started.names, heard.ready) == (over, 0)
            group.on_message(child("router"), READY)
            joined = ClusterView("r", "serving", instances=tuple(SimpleNamespace(name=name) for name in engines))  # type: ignore[misc]
            for _ in range(2):
                group.on_message(child("router"), joined)
            assert (started.names, heard.ready) == (["over"], 1)

    finish(main())


class Running(StartedToo):
    """Children that run, and may be killed."""

    hangs: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.killed: list[str] = []

    def get(self, name: str) -> Any:
        kill = lambda: self.killed.append(name)  # noqa: E731
        return SimpleNamespace(control=SimpleNamespace(send=lambda message: None), kill=kill, set_last_words=lambda text: None)


def test_an_instance_that_was_lost_while_others_loaded_new_weights_is_started_with_these():
    """It came back with the former ones, and was refused for as long as the cluster ran."""

    async def main() -> None:
        group, _ = up_group(a=on_gpu(0), b=on_gpu(1))
        group._children = running = Running()  # type: ignore[assignment]
        former = group._config.engines["a"].worker.model
        for name in ("a", "b", "router"):
            group.on_started(child(name))
        refused = ClusterView("r", "serving", refused=(RefusedView("b", "b does not fit a", 1, 0.1),))
        group.on_message(child("router"), refused)
        assert running.killed == [], "it has the weights of all, and is refused for something else"
        group.on_message(child("a"), ModelChanged("/new", b"new"))
        group.on_message(child("router"), ClusterView("r", "serving"))
        assert running.killed == [], "it may be loading them"
        for _ in range(2):
            group.on_message(child("router"), refused)
        assert running.killed == ["b"], "once"
        assert group._config.engines["b"].worker.model == "/new" != former
        group.on_started(child("b"))
        group.on_message(child("router"), refused)
        assert running.killed == ["b"]

    finish(main())


class RouterAlone(UpGroup):
    def on_message(self, child: Child, message: Any) -> None:
        super().on_message(child, message)
        if type(message) is RouterListening and self._reporter.lost:
            self._reporter.again.set()
        elif type(message) is RouterListening and self._reporter.stops_first:
            child.process.send_signal(signal.SIGSTOP)


@pytest.mark.usefixtures("child_path")
@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_router_that_is_lost_before_an_instance_has_joined_is_started_again(tmp_path: Path, how: str):
    changes: dict[str, Any] = {"silent_seconds_max": 3.0}
    if how == "fails":
        changes = {"module": "failing_router", "environment": {"FAILED_ONCE": str(tmp_path / "failed")}}
    text = {"fails": "the router fails", "hangs": "the router process said nothing for 3 s and was killed"}[how]

    async def main() -> None:
        create_secret(tmp_path / "secret")
        serve = ServeConfig(model=str(make_model(tmp_path / "model")), port=free_port(), drain_seconds_max=0.5)
        listen, secret = f"unix:{tmp_path / 'router.sock'}", str(tmp_path / "secret")
        config = RouterProcessConfig(serve=serve, router=RouterConfig(), listen=listen, cluster_secret=secret)
        rows = tuple(replace(row, **changes) for row in up_children([]))
        heard = Heard()
        heard.stops_first = how == "hangs"
        group = RouterAlone(UpConfig(router=config, engines={}), heard, rows)
        running, again = asyncio.create_task(group.run()), asyncio.create_task(heard.again.wait())
        try:
            await asyncio.wait({running, again}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert not running.done(), running.result()
            assert again.done()
            assert heard.lost == [text]
            assert group._children.hangs == {"router": int(how == "hangs")}
            assert (await ask(serve.port, "/live", None)).status == 200
            assert (await ask(serve.port, "/ready", None)).status == 503
        finally:
            group.stop()
            again.cancel()
            await asyncio.wait({running}, timeout=30)
        await running

    finish(main())
