"""The loop's lag is what a timer was late by: nothing while the loop is free, the whole delay while something holds it up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.runtime.processes import loop_lag
from baton.runtime.processes.loop_lag import INTERVAL_SECONDS, SAMPLES, LoopLag


class Loop:
    """A loop whose time passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        self.timers.append((when, call))

    def run_late_by(self, seconds: float) -> None:
        (when, call), self.timers = self.timers[0], []
        self.now = when + seconds
        call()


def test_the_largest_of_the_last_delays_is_the_lag(monkeypatch: pytest.MonkeyPatch):
    loop = Loop()
    monkeypatch.setattr(loop_lag.asyncio, "get_running_loop", lambda: loop)
    lag = LoopLag()
    assert lag.seconds == 0.0
    loop.run_late_by(0.25)
    loop.run_late_by(0.5)
    loop.run_late_by(0.0)
    assert (lag.seconds, lag.microseconds) == (0.5, 500_000)
    loop.now += INTERVAL_SECONDS + 2.0
    assert lag.seconds == 2.0, "while it is held up, before the timer has run"
    loop.run_late_by(2.0)
    for _ in range(SAMPLES):
        loop.run_late_by(0.125)
    assert lag.seconds == 0.125
