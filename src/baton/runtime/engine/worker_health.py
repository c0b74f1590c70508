"""What the engine says when asked whether it is well: from its machine and the worker's progress word, never behind plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from baton.core.engine.progress_watch import ProgressWatch
from baton.core.engine.worker_watch import WorkerState
from baton.core.instance import Instance
from baton.protocol.ids import Instant
from baton.protocol.progress import ProgressWord


class WorkerHealth:
    def __init__(self) -> None:
        self._word: ProgressWord | None = None
        self._watch = ProgressWatch()
        self._asked = 0
        "The word when `progressed` was last asked."

    def attach(self, fd: int) -> None:
        """A worker has begun, with this word."""
        self.detach()
        self._word = ProgressWord(fd)

    def detach(self) -> None:
        if self._word is not None:
            self._word.close()
        self._word, self._watch = None, ProgressWatch()

    def look(self, instance: Instance, now: float) -> None:
        """While plans are in flight: several times per second."""
        self._watch.look(None if self._word is None else self._word.value, bool(instance.in_flight), Instant(now))

    def progressed(self) -> bool:
        """Whether the word has changed since this was last asked."""
        before, self._asked = self._asked, self._word.value if self._word is not None else self._asked
        return self._asked != before

    @property
    def known(self) -> bool:
        """Whether there is a word to look at."""
        return self._word is not None

    def fault(self, instance: Instance, now: float) -> str:
        """What is wrong. Empty: nothing."""
        if instance.worker.state is WorkerState.ASLEEP:
            return ""  # as it was told
        if instance.worker.state is not WorkerState.READY:
            return "the worker was lost and is being started again"
        self.look(instance, now)
        stalled = self._watch.stalled_seconds(Instant(now))
        return f"the worker has made no progress for {stalled:.1f} s" if stalled else ""


PROBE: Final = 0
"""Number of the ping by which the engine itself asks its worker. Those of callers begin at 1."""
PROBE_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 1.0


class IdleProbe:
    """A worker without work shows no progress, so it is asked whether it is there: about once a second, for the routers, which
    are to know before they send it something."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._next = 0.0

    def answered(self, now: float) -> None:
        self._asked_at, self._next = None, now + PROBE_SECONDS

    def look(self, now: float, *, idle: bool, ask: Callable[[], None]) -> str:
        """To be called several times per second. What is wrong; empty: nothing, as far as is known."""
        if not idle:
            self._asked_at = None  # its progress is watched
        elif self._asked_at is None:
            if now >= self._next:
                self._asked_at = now
                ask()
        elif now - self._asked_at > ANSWER_SECONDS:
            return f"the worker has not answered for {now - self._asked_at:.1f} s"
        return ""
