"""A process's own clock: it begins at another time than its neighbour's, and may run at another speed.

Only durations may cross the wire between two processes; the skew exposes a time that does.
"""

from __future__ import annotations

from baton.protocol.ids import Instant
from baton.sim.noise import noise
from baton.sim.timeline import Timeline

DRIFT = 0.01
OFFSET = 1000.0


class Clock:
    __slots__ = ("_offset", "_rate", "_timeline", "jumped_ahead")

    def __init__(self, timeline: Timeline, seed: int, number: int, *, skewed: bool) -> None:
        self.jumped_ahead = False
        self._timeline = timeline
        self._offset = OFFSET * noise(seed, 1000 + number) if skewed else 0.0
        self._rate = 1.0 + (DRIFT * (2 * noise(seed, 2000 + number) - 1) if skewed else 0.0)

    def now(self) -> Instant:
        return Instant(self._timeline.now * self._rate + self._offset)

    def jump(self, seconds: float) -> None:
        """Set the clock, ahead or back."""
        self._offset += seconds
        self.jumped_ahead |= seconds > 0

    def virtual(self, instant: float) -> float:
        """Virtual time at which this clock shows `instant`."""
        return (instant - self._offset) / self._rate
