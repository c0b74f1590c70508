"""The delay before a lost process is started again, and the limit of restarts: a worker, a cache service, a front, an instance
of `baton up`."""

from __future__ import annotations

from typing import Final

HEALTHY_SECONDS: Final = 30.0
"""Seconds ready after which a loss begins a new row of losses."""
BACKOFF_SECONDS: Final = 0.1
"""Delay before the second restart in a row; doubled for each one after it."""


class Restarts:
    __slots__ = ("_backoff_seconds_max", "_in_a_row", "_losses_max", "losses")

    def __init__(self, losses_max: int | None, backoff_seconds_max: float) -> None:
        """`losses_max`: maximum of losses in a row. None: no limit."""
        self._losses_max = losses_max
        self._backoff_seconds_max = backoff_seconds_max
        self.losses = 0
        "Number of losses in a row that count towards the end."
        self._in_a_row = 0
        "Number of restarts in a row, of any cause."

    def clear(self) -> None:
        self.losses = self._in_a_row = 0

    def next_delay(self, ready_seconds: float = 0.0, *, counts: bool = True) -> float | None:
        """Seconds before the next start of a process that was lost after `ready_seconds`; 0 before the first: most losses are
        single ones. None: there is no next start."""
        if ready_seconds >= HEALTHY_SECONDS:
            self.clear()
        self.losses += counts
        if self._losses_max is not None and self.losses > self._losses_max:
            return None
        self._in_a_row += 1
        if self._in_a_row == 1:
            return 0.0
        return min(BACKOFF_SECONDS * 2.0 ** min(self._in_a_row - 2, 32), self._backoff_seconds_max)
