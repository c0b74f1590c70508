"""Measures the delay of a process's event loop, by a timer that should run once per second.

A late loop answers nothing: heartbeats, tokens and health checks all wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

INTERVAL_SECONDS: Final = 1.0
SAMPLES: Final = 10
"""Number of samples of which the largest is shown: a scrape every 10 seconds misses nothing."""


class LoopLag:
    """Measures the delay of the running loop, from the creation of this object on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._due = self._loop.time() + INTERVAL_SECONDS
        self._timer = self._loop.call_at(self._due, self._measure)

    @property
    def seconds(self) -> float:
        """The largest of the last samples, or the present delay if that is longer."""
        return max(*self._samples, self._loop.time() - self._due, 0.0)

    @property
    def microseconds(self) -> int:
        return int(self.seconds * 1e6)

    def close(self) -> None:
        self._timer.cancel()

    def _measure(self) -> None:
        now = self._loop.time()
        self._samples.append(max(0.0, now - self._due))
        self._due = now + INTERVAL_SECONDS
        self._timer = self._loop.call_at(self._due, self._measure)
