"""Orders that are made of several: what is left of them where one is refused, or nobody waits any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from client_pair import Pair
from run_loop import finish

from baton.errors import CallerError, Unavailable
from baton.protocol.control import OrderAnswer, PauseInstance, ResumeInstance, SleepInstance, WakeInstance
from baton.runtime.front.orders import Orders


async def obey(pair: Pair, *orders: tuple[type[Any], str]) -> list[Any]:
    """The engine hears these orders, one after the other, and answers each so."""
    taken = []
    for kind, outcome in orders:
        order: Any = await pair.heard()
        assert type(order) is kind
        taken.append(order)
        pair.engine.send(OrderAnswer(order.number, outcome, "" if outcome == "done" else "no such file"))
    return taken


def test_weights_that_cannot_be_loaded_leave_an_engine_that_serves():
    """It sleeps, wakes with the old ones, and is resumed: else it would be paused for good."""

    async def main() -> None:
        async with Pair() as pair, asyncio.timeout(20):
            loading = asyncio.create_task(pair.client.load_weights("/other", 3.0))
            steps = [(PauseInstance, "done"), (SleepInstance, "done"), (WakeInstance, "refused"), (ResumeInstance, "done")]
            pause, _, wake, _ = await obey(pair, *steps)
            assert (pause.drain_seconds_max, wake.model) == (3.0, "/other")
            with pytest.raises(CallerError, match="no such file"):
                await loading

    finish(main())


def test_weights_that_are_loaded_are_served():
    async def main() -> None:
        async with Pair() as pair, asyncio.timeout(20):
            loading = asyncio.create_task(pair.client.load_weights("/other", None))
            await obey(pair, *((kind, "done") for kind in (PauseInstance, SleepInstance, WakeInstance, ResumeInstance)))
            await loading

    finish(main())


def test_nothing_is_kept_of_what_nobody_waits_for():
    async def main() -> None:
        orders = Orders(lambda message: None)
        with pytest.raises(Unavailable, match="did not answer"):
            await orders.ping(0.001)
        assert orders.waiting == 0
        resuming = asyncio.ensure_future(orders.resume())
        pinging = asyncio.ensure_future(orders.ping(60))
        await asyncio.sleep(0)
        orders.fail("the engine is gone")
        for asked in (resuming, pinging):
            with pytest.raises(Unavailable, match="the engine is gone"):
                await asked
        assert orders.waiting == 0

    finish(main())
