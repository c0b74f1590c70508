"""What `baton serve` remembers for the next engine, and how it is told to stop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from run_loop import finish

from baton.config import ServeConfig
from baton.errors import Unavailable
from baton.protocol.control import InstanceReady, LoadProgress, ModelChanged
from baton.runtime import process_group
from baton.runtime.process_table import SUPERVISOR_CHILDREN
from baton.runtime.supervisor import Supervisor

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
