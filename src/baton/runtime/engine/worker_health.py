"""Health of the worker: judged by the machine and the worker's progress word, never queued behind plans."""

from __future__ import annotations

from baton.core.engine.progress_watch import ProgressWatch
from baton.core.engine.worker_watch import WorkerState
from baton.core.instance import Instance
from baton.core.worker_set import SlowestProgress
from baton.protocol.ids import Instant
from baton.protocol.progress import ProgressWord


class WorkerHealth:
    def __init__(self) -> None:
        self._words: dict[int, ProgressWord] = {}
        "Progress words, by rank. A worker set makes the progress of its slowest rank."
        self._slowest = SlowestProgress()
        self._watch = ProgressWatch()
        self._asked = 0
        "The word's value at the last call of `progressed`."

    def attach(self, fd: int, rank: int = 0) -> None:
        """Watch a started worker; `fd` is its progress word."""
        if rank in self._words:
            self.detach()
        self._words[rank] = ProgressWord(fd)

    def detach(self) -> None:
        for word in self._words.values():
            word.close()
        self._words, self._slowest, self._watch = {}, SlowestProgress(), ProgressWatch()

    @property
    def _word(self) -> int | None:
        return self._slowest.observe(tuple(word.value for word in self._words.values())) if self._words else None

    def observe(self, instance: Instance, now: float) -> None:
        """Record the word. Called several times per second while plans are in flight."""
        self._watch.observe(self._word, bool(instance.in_flight), Instant(now))

    def progressed(self) -> bool:
        """Whether the word has changed since the last call."""
        word = self._word
        before, self._asked = self._asked, word if word is not None else self._asked
        return self._asked != before

    @property
    def known(self) -> bool:
        """Whether there is a word to read."""
        return bool(self._words)

    def fault(self, instance: Instance, now: float) -> str:
        """Description of the worker's fault. Empty: none."""
        if instance.worker.state is WorkerState.ASLEEP:
            return ""  # the worker sleeps by order
        if instance.worker.state is not WorkerState.READY:
            return "the worker was lost and is being started again"
        self.observe(instance, now)
        stalled = self._watch.stalled_seconds(Instant(now))
        return f"the worker has made no progress for {stalled:.1f} s" if stalled else ""
