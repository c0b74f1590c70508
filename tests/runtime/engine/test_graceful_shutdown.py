"""An instance that is told to end: whom it waits for, and how long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from run_loop import finish

from baton.core.effects import Mode
from baton.core.events import Pause
from baton.runtime.engine import graceful_shutdown as module
from baton.runtime.engine.graceful_shutdown import Leaving


class Engine:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def dispatch(self, event: Any) -> None:
        self.events.append(event)


@pytest.mark.parametrize("end", ["paused", "alone"])
def test_it_drains_once_until_it_is_paused_or_nobody_is_left(end: str):
    async def main() -> None:
        leaving, engine = Leaving(), Engine()
        leaving.on_alone()  # before anybody told it to end, that means nothing
        first, second = (asyncio.create_task(leaving.drained(engine, 60.0)) for _ in range(2))
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.events == [Pause(60.0)], "whoever comes second waits for the first one's drain"
        leaving.on_mode(Mode.DRAINING)
        assert not first.done()
        assert not second.done()
        leaving.on_mode(Mode.PAUSED) if end == "paused" else leaving.on_alone()
        await asyncio.wait_for(asyncio.gather(first, second), 20)

    finish(main())


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PAUSED_SECONDS", 0.01)

    async def main() -> None:
        await asyncio.wait_for(Leaving().drained(Engine(), 0.0), 20)

    finish(main())


def test_a_drain_that_the_front_ordered_is_not_begun_anew():
    async def main() -> None:
        leaving, engine = Leaving(), Engine()
        leaving.on_mode(Mode.DRAINING)
        ending = asyncio.create_task(leaving.drained(engine, 60.0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.events == [Pause(0.0)], "its time is up"
        leaving.on_mode(Mode.PAUSED)
        await asyncio.wait_for(ending, 20)

    finish(main())
