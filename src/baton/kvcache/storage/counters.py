"""Counters that several threads increment without a lock: one dictionary per thread, summed up on demand."""

from __future__ import annotations

import threading
from typing import Literal

Counter = Literal["hits", "misses", "corrupt", "bytes_read", "stored", "present", "bytes_written", "evicted", "bytes_evicted"]
"""Names of counters. hits, misses, corrupt: objects requested by `get`. stored: objects written; present: objects that were
stored already."""


class Counters:
    def __init__(self) -> None:
        self._mine = threading.local()
        self._all: list[dict[str, int]] = []

    def add(self, name: Counter, amount: int = 1) -> None:
        try:
            counts: dict[str, int] = self._mine.counts
        except AttributeError:
            counts = self._mine.counts = {}
            self._all.append(counts)
        counts[name] = counts.get(name, 0) + amount

    def totals(self) -> dict[str, int]:
        summed: dict[str, int] = dict.fromkeys(Counter.__args__, 0)  # type: ignore[attr-defined]
        for counts in list(self._all):
            for name, amount in list(counts.items()):
                summed[name] += amount
        return summed
