"""Reservations that wait for room at a decode instance: the most urgent first, then the oldest.

Several routers may each believe in the same free room. The request that comes too late waits here instead of bouncing between
router and instance, and no request overtakes another: a large one gets the room that small ones would take from it. Every entry
has a deadline (Destination.deadlines), and the number of entries is bounded: beyond it the least urgent is refused.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from baton.core.engine.request import Sequence, by_urgency
from baton.errors import InvariantBroken


class ReservationQueue:
    __slots__ = ("_limit", "_waiting")

    def __init__(self, waiting: list[Sequence], limit: int) -> None:
        """`waiting`: the board's list, in which admission sees them too. Only this class changes it."""
        self._waiting = waiting
        self._limit = limit

    def __len__(self) -> int:
        return len(self._waiting)

    def head(self) -> Sequence | None:
        return self._waiting[0] if self._waiting else None

    def join(self, sequence: Sequence) -> None:
        """Add the sequence. The queue may exceed its bound by one then: see `surplus`."""
        insort(self._waiting, sequence, key=by_urgency)

    def surplus(self) -> Sequence | None:
        """The least urgent sequence, if too many wait."""
        return self._waiting[-1] if len(self._waiting) > self._limit else None

    def leave(self, sequence: Sequence) -> None:
        place = bisect_left(self._waiting, sequence.order, key=by_urgency)
        if place < len(self._waiting) and self._waiting[place] is sequence:
            del self._waiting[place]

    def check(self) -> None:
        """34: in order. 49: within the bound. 25: without blocks."""
        if len(self._waiting) > self._limit:
            raise InvariantBroken(f"{len(self._waiting)} reservations wait, and {self._limit} may", invariant=49)
        if sorted(self._waiting, key=by_urgency) != self._waiting:
            raise InvariantBroken("waiting reservations are not in the order of the queue", invariant=34)
        for sequence in self._waiting:
            if sequence.blocks:
                raise InvariantBroken(f"{sequence!r} waits for room that it has", invariant=25)
