"""A heap of deadlines, the earliest first. Setting and removing cost the same with ten keys or ten thousand.

Each key has at most one deadline. A heap entry is stale when its key was set again or discarded. Stale entries are dropped when
they come to the top, so the top is always current. `earliest` is an attribute and not a method: every event of a machine reads
several of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from baton.protocol.ids import Instant

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    __slots__ = ("_current", "_heap", "_order", "earliest")

    def __init__(self) -> None:
        self._current: dict[Key, int] = {}
        "Number of the key's current heap entry."
        self._heap: list[tuple[Instant, int, Key]] = []
        self._order = count()
        self.earliest: Instant | None = None
        "The earliest deadline. None: no deadline is set."

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, key: Key) -> bool:
        return key in self._current

    def __repr__(self) -> str:
        return f"<Deadlines of {len(self._current)}, next {self.earliest}>"

    def first(self) -> Key:
        """Return the key with the earliest deadline. At least one deadline must be set."""
        return self._heap[0][2]

    def set(self, key: Key, at: Instant) -> None:
        """Set the key's deadline; an earlier one is replaced."""
        self._current[key] = number = next(self._order)
        heappush(self._heap, (at, number, key))
        if len(self._heap) > 2 * len(self._current) + 64:  # most entries are stale
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapify(self._heap)
        self._drop_stale()

    def discard(self, key: Key) -> None:
        if self._current.pop(key, None) is not None:
            self._drop_stale()

    def clear(self) -> None:
        self._current.clear()
        self._heap.clear()
        self.earliest = None

    def due(self, now: Instant) -> list[Key]:
        """Remove and return the keys whose deadline has passed, the earliest first."""
        passed: list[Key] = []
        while self._heap and self._heap[0][0] <= now:
            key = heappop(self._heap)[2]
            del self._current[key]
            passed.append(key)
            self._drop_stale()
        return passed  # `_drop_stale` has updated `earliest`

    def _is_current(self, entry: tuple[Instant, int, Key]) -> bool:
        return self._current.get(entry[2]) == entry[1]

    def _drop_stale(self) -> None:
        while self._heap and not self._is_current(self._heap[0]):
            heappop(self._heap)
        self.earliest = self._heap[0][0] if self._heap else None
