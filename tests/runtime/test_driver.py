"""The loop around a machine: effects to ports, one timer, and news before deadlines."""

from __future__ import annotations

import asyncio
import time

from run_loop import finish

from baton.protocol.control import Ping
from baton.protocol.ids import Instant
from baton.runtime.driver import Driver
from baton.runtime.wire.channel import Channel


class Alarm:
    """A machine whose events are deadlines (None: none), and whose effects are the events."""

    def __init__(self) -> None:
        self.deadline: Instant | None = None
        self.looked = 0

    def handle(self, event: float | None, now: Instant) -> list:
        self.deadline = None if event is None else Instant(now + event)
        return [event, str(event)]

    def next_deadline(self) -> Instant | None:
        self.looked += 1
        return self.deadline

    def check(self) -> None: ...


class Rig:
    def __init__(self) -> None:
        self.machine = Alarm()
        self.effects: list = []
        self.due: list[float] = []
        self.loop = asyncio.get_running_loop()
        put = self.effects.append
        self.driver: Driver = Driver(self.machine, {float: put, str: put, type(None): put}, self._on_due)

    def _on_due(self) -> None:
        assert self.machine.deadline is not None
        assert self.machine.deadline <= self.loop.time()
        self.due.append(self.machine.deadline)
        self.driver.dispatch(None)

    async def until_due(self, count: int = 1) -> None:
        while len(self.due) < count:
            await asyncio.sleep(0.005)


def test_effects_go_to_the_port_of_their_type_in_order():
    async def main() -> None:
        rig = Rig()
        rig.driver.dispatch(100.0)
        rig.driver.dispatch(None)
        assert rig.effects == [100.0, "100.0", None, "None"]
        rig.driver.close()

    finish(main())


def test_a_deadline_that_comes_is_told_once():
    async def main() -> None:
        rig = Rig()
        rig.driver.dispatch(0.01)
        await rig.until_due()
        await asyncio.sleep(0.03)
        assert len(rig.due) == 1

    finish(main())


def test_an_earlier_deadline_takes_the_timer_and_a_later_one_is_found_when_it_fires():
    async def main() -> None:
        rig = Rig()
        rig.driver.dispatch(100.0)
        rig.driver.dispatch(0.01)  # earlier: armed anew
        await rig.until_due()
        rig.driver.dispatch(0.01)
        rig.driver.dispatch(0.05)  # later: the early timer finds nothing due, and is set again
        wanted = rig.machine.deadline
        await rig.until_due(2)
        assert rig.due[1] == wanted

    finish(main())


def test_a_deadline_that_went_away_is_not_told_and_a_new_one_still_is():
    async def main() -> None:
        rig = Rig()
        rig.driver.dispatch(0.01)
        rig.driver.dispatch(None)
        await asyncio.sleep(0.05)
        assert rig.due == []
        rig.driver.dispatch(0.01)
        await rig.until_due()

    finish(main())


def test_a_closed_driver_stays_silent():
    async def main() -> None:
        rig = Rig()
        rig.driver.dispatch(0.01)
        rig.driver.close()
        await asyncio.sleep(0.05)
        assert rig.due == []

    finish(main())


def test_many_events_arm_one_timer():
    async def main() -> None:
        rig = Rig()
        for _ in range(1000):
            rig.driver.dispatch(50.0)
        armed = [handle for handle in rig.loop._scheduled if not handle.cancelled()]
        assert len(armed) <= 2  # ours, and the one of this test's own time-out
        rig.driver.close()

    finish(main())


def test_after_a_pause_of_the_process_the_news_go_before_the_deadline(pair):
    """The result that was waited for lies in the socket, and its deadline has passed too: it was in time, we were not."""

    async def main() -> None:
        rig = Rig()
        channel = await Channel.open(pair[0])

        async def read() -> None:
            await channel.receive()
            rig.driver.dispatch(None)

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        rig.driver.dispatch(0.02)
        other = await Channel.open(pair[1])
        other.send(Ping(1))
        time.sleep(0.1)  # everything stands still
        await asyncio.wait_for(reading, 10)
        await asyncio.sleep(0.02)
        assert rig.due == []
        channel.close()
        other.close()

    finish(main())
