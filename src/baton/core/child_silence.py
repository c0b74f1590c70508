"""Detects a child process whose event loop hangs: its parent pings it, and kills it if no answer comes.

seconds_max              after this time without an answer the child hangs: an endless loop, a deadlock, SIGSTOP
STARTING * seconds_max   the same for the first answer: a new process imports its modules before it has a loop

Only time in which the parent itself ran counts. A late call of `observe` means that the parent was stopped (SIGSTOP of all
processes, a sleeping laptop): the answer may be unread, and the child may have been stopped too.

    observe    |-----|-----|------ parent stopped ------|-----|     one ping is open at a time
    counted       5     5               0                  5  s
"""

from __future__ import annotations

from typing import Final, Literal

from baton.protocol.ids import Instant

SILENT_SECONDS_MAX: Final = 30.0
"""Long enough for every call that blocks the loop of a healthy process."""
STARTING: Final = 10
PERIODS: Final = 6
"""Number of calls of `observe` within seconds_max."""
LATE: Final = 1.5
"""A call of `observe` is late if so many periods have passed since the last one."""

Order = Literal["ping", "wait", "kill"]


class ChildSilence:
    __slots__ = ("_has_answered", "_observed_at", "_pinged", "period_seconds", "seconds", "seconds_max")

    def __init__(self, seconds_max: float = SILENT_SECONDS_MAX) -> None:
        self.seconds_max = seconds_max
        self.period_seconds = seconds_max / PERIODS
        "Seconds between calls of `observe`."
        self.seconds = 0.0
        "Counted seconds since the ping that is not answered; 0: none is open."
        self._pinged = False
        self._has_answered = False
        self._observed_at: Instant | None = None

    def answered(self) -> None:
        self._has_answered, self._pinged, self.seconds = True, False, 0.0

    def observe(self, now: Instant) -> Order:
        """Return what to do with the child now."""
        passed = 0.0 if self._observed_at is None else now - self._observed_at
        self._observed_at = now
        if not self._pinged:
            self._pinged = True
            return "ping"
        if 0.0 < passed < LATE * self.period_seconds:
            self.seconds += passed
        limit = self.seconds_max if self._has_answered else STARTING * self.seconds_max
        return "kill" if self.seconds >= limit else "wait"
