"""Detects a dead idle worker: without progress to watch, the engine pings it about once per second.

no answer for ANSWER_SECONDS      a fault: routers and load balancers send no requests
none for step_seconds_max         it hangs, and is replaced (event WorkerSilent). A step's deadline cannot find it: with a
                                  fault no request comes, so no step begins
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

PROBE: Final = 0
"""Number of the engine's own ping to its worker. Callers' pings begin at 1."""
PROBE_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 1.0
LATE_SECONDS: Final = 2.0
"""Seconds between calls of `observe` that mean that the engine itself was stopped: the answer may be unread."""


class IdleProbe:
    __slots__ = ("_asked_at", "_next", "_observed_at")

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._observed_at: float | None = None
        self._next = 0.0

    def answered(self, now: float) -> None:
        self._asked_at, self._next = None, now + PROBE_SECONDS

    def observe(self, now: float, *, idle: bool, ask: Callable[[], None]) -> str:
        """Ping the worker if one is due, and return its fault in words; empty: none known. Called at least once per second."""
        late = self._observed_at is not None and now - self._observed_at > LATE_SECONDS
        self._observed_at = now
        if not idle:
            self._asked_at = None  # the worker's progress is watched
        elif self._asked_at is None:
            if now >= self._next:
                self._asked_at = now
                ask()
        elif late:
            self._asked_at = now
        elif now - self._asked_at > ANSWER_SECONDS:
            return f"the worker has not answered for {now - self._asked_at:.1f} s"
        return ""

    def silent_seconds(self, now: float) -> float:
        """Seconds since the ping that is not answered; 0: none is open."""
        return 0.0 if self._asked_at is None else now - self._asked_at
