"""The contents of a store, for operators: objects by identity and age, and their removal. Servers may use the store meanwhile.

A listing never renews an object's time of last use. `remove` leaves an object alone that was used after it was listed. Any
object may be removed at any time: that is a miss, never a fault (backend.py). So a removal that is interrupted leaves a correct
store with some objects less.

Only stores that can list their objects have one: directories and Redis (open.py: open_listing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

Advance = Callable[[int, int], None]
"""Progress callback: steps done, and their number or 0."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    place: str
    "Path of the file, or name of the value."
    key: str
    identity: str
    "Label and rank: blocks of one model, as one kernel variant computes them (backend.py: LayoutName.identity)."
    nbytes: int
    used_at: float | None
    "Time of last use in seconds of the wall clock. None: the store does not know."


@dataclass(slots=True)
class IdentityTotals:
    """Totals over all objects of one identity and rank."""

    identity: str
    objects: int = 0
    nbytes: int = 0
    oldest: float | None = None
    newest: float | None = None

    def add(self, found: StoredObject) -> None:
        self.objects += 1
        self.nbytes += found.nbytes
        if found.used_at is not None:
            self.oldest = min(found.used_at, self.oldest or found.used_at)
            self.newest = max(found.used_at, self.newest or 0.0)


class Listing(Protocol):
    place: str
    "Name of the store, without a password."

    def objects(self, advance: Advance) -> Iterator[StoredObject]: ...

    def remove(self, found: Iterable[StoredObject], advance: Advance) -> int:
        """Remove the objects of `found` that were not used since they were listed. Returns the number of removed objects."""
        ...
