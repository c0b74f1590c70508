"""What the engine says when asked whether it is well: from its machine and the worker's progress word, never behind plans."""

from __future__ import annotations

from baton.core.engine.instance import Instance
from baton.core.engine.progress_watch import ProgressWatch
from baton.core.engine.worker_watch import WorkerState
from baton.protocol.ids import Instant
from baton.protocol.progress import ProgressWord


class WorkerHealth:
    def __init__(self) -> None:
        self._word: ProgressWord | None = None
        self._watch = ProgressWatch()

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
