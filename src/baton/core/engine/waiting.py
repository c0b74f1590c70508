"""The queue. Head and join cost the same with ten waiting sequences or ten thousand; leaving is free (the entry is skipped
later)."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from baton.core.engine.phase import Phase
from baton.core.engine.request import QueueKey, Sequence
from baton.errors import InvariantBroken


class WaitingQueue:
    """The queue, ordered by `Sequence.order`, which a sequence keeps for life: a preempted sequence returns to its old
    place."""

    __slots__ = ("_heap", "returned", "waiting")

    def __init__(self) -> None:
        self._heap: list[tuple[QueueKey, Sequence]] = []
        self.waiting = 0
        "Sequences in the queue."
        self.returned = 0
        "Sequences in the queue that have been on the worker before: preempted, or their worker was lost."

    def __len__(self) -> int:
        return self.waiting

    def join(self, sequence: Sequence) -> None:
        heappush(self._heap, (sequence.order, sequence))
        self.waiting += 1
        self.returned += not sequence.queued

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence, which has ended or is about to be admitted. Its entry is dropped when it comes to the head."""
        self.waiting -= 1
        self.returned -= not sequence.queued
        if len(self._heap) > 2 * self.waiting + 64:
            live = {order: (order, s) for order, s in self._heap if s.phase is Phase.WAITING}
            self._heap = list(live.values())
            heapify(self._heap)

    def head(self) -> Sequence | None:
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.phase is Phase.WAITING:
                return sequence
            heappop(self._heap)
        return None

    def pop(self) -> None:
        """Remove and return the head, which is admitted."""
        self.leave(heappop(self._heap)[1])

    def check(self, waiting: list[Sequence], leased: list[Sequence]) -> None:
        """25 for sequences whose phase is WAITING: counted right, and holding nothing but leases."""
        if len(waiting) != self.waiting:
            raise InvariantBroken(f"{len(waiting)} wait, the line counts {self.waiting}", invariant=25)
        if sum(not sequence.queued for sequence in waiting) != self.returned:
            raise InvariantBroken(f"{self.returned} are counted as back in line", invariant=25)
        for sequence in waiting:
            if (sequence.blocks and sequence not in leased) or sequence.slot >= 0 or sequence.in_flight + sequence.drafts:
                raise InvariantBroken(f"{sequence!r} waits and holds something", invariant=25)
