"""Detects a worker without progress, by a word that it advances several times per layer (protocol/progress.py).

Stalled means: work is due, and the word has not changed for STALL_SECONDS. However long a step takes, the worker is healthy
while the word changes. Without work no progress is expected.
"""

from __future__ import annotations

from typing import Final

from baton.protocol.ids import Instant

STALL_SECONDS: Final = 1.0


class ProgressWatch:
    __slots__ = ("_seen", "_since")

    def __init__(self) -> None:
        self._seen: int | None = None
        self._since: Instant | None = None
        "Time when the word was first seen with its present value, or when work became due. None: no work is due."

    def observe(self, word: int | None, due: bool, now: Instant) -> None:
        """Record the word; called often while work is due. `word` None: this worker has none, and its progress is unknown."""
        if not due or word is None:
            self._since = None
        elif self._since is None or word != self._seen or now < self._since:  # a clock may go backwards
            self._since = now
        self._seen = word

    def stalled_seconds(self, now: Instant) -> float:
        """Seconds without progress while work is due; 0 below STALL_SECONDS."""
        waited = 0.0 if self._since is None else now - self._since
        return waited if waited >= STALL_SECONDS else 0.0
