"""How often, and how soon, a lost child is started again: the worker's rule (core/engine/worker_watch.py), in seconds."""

from __future__ import annotations

from typing import Final

HEALTHY_SECONDS: Final = 30.0
"""A child that was ready for so long ends the row of losses."""
BACKOFF_SECONDS: Final = 0.1
"""Before the second restart in a row; doubled for each one after it."""


class Restarts:
    def __init__(self, in_a_row_max: int | None, backoff_seconds_max: float) -> None:
        """`in_a_row_max`: None is without end."""
        self._max = in_a_row_max
        self._backoff_seconds_max = backoff_seconds_max
        self._in_a_row = 0

    def next_delay(self, ready_seconds: float) -> float | None:
        """One is lost that was ready for so long. Seconds to wait before the next one; None: there is no next one."""
        if ready_seconds >= HEALTHY_SECONDS:
            self._in_a_row = 0
        if self._max is not None and self._in_a_row >= self._max:
            return None
        self._in_a_row += 1
        if self._in_a_row == 1:
            return 0.0
        return min(BACKOFF_SECONDS * 2.0 ** min(self._in_a_row - 2, 32), self._backoff_seconds_max)
