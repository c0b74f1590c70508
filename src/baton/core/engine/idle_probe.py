"""Is an idle worker alive? It shows no progress, so it is pinged about once per second.

no answer for ANSWER_SECONDS      a fault: routers and load balancers send no requests
none for step_seconds_max         it hangs, and is replaced (event WorkerSilent). A step's deadline cannot find it: with a
                                  fault no request comes, so no step begins
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

PROBE: Final = 0
"""Number of the engine's own ping to its worker. Those of callers begin at 1."""
PROBE_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 1.0
LATE_SECONDS: Final = 2.0
"""Calls of `look` this far apart mean that the engine itself was stopped: the answer may be unread."""


class IdleProbe:
    __slots__ = ("_asked_at", "_looked_at", "_next")

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._looked_at: float | None = None
        self._next = 0.0

    def answered(self, now: float) -> None:
        self._asked_at, self._next = None, now + PROBE_SECONDS

    def look(self, now: float, *, idle: bool, ask: Callable[[], None]) -> str:
        """Called at least once per second. Returns a description of the fault; empty: none known."""
        late = self._looked_at is not None and now - self._looked_at > LATE_SECONDS
        self._looked_at = now
        if not idle:
            self._asked_at = None  # its progress is watched
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
