"""The waiting sequences, those on the worker, and their order: computed only from the messages of clients and worker.

A leader waits from its submission on, its siblings from the leader's first token or end. A dropped sequence that has not ended
waits again, at its old place, and may be admitted once the drop is acknowledged. A lost worker returns all sequences to the
queue.

Two things cannot be known from outside: a suspect is held back until it is cleared (core/engine/recovery.py), and a sequence
whose KV a lower tier has is out of the queue while that is loaded (loading.py). So the phase of the head is read from the
instance.
"""

from __future__ import annotations

from heapq import heappop, heappush

from baton.core.engine.phase import Phase
from baton.errors import InvariantBroken
from baton.sim.simulated_request import QueueKey, SimulatedRequest

Place = tuple[SimulatedRequest, int]


class Line:
    def __init__(self) -> None:
        self.waiting: dict[QueueKey, Place] = {}
        self.on_worker: dict[QueueKey, Place] = {}
        self.dropped: dict[QueueKey, int] = {}
        "Whether sequences wait again while the step that drops them has no result yet."
        self._heap: list[QueueKey] = []

    def joins(self, client_request: SimulatedRequest, index: int) -> None:
        order = client_request.orders[index]
        self.waiting[order] = client_request, index
        heappush(self._heap, order)

    def siblings_join(self, client_request: SimulatedRequest) -> None:
        if not client_request.siblings_wait:
            client_request.siblings_wait = True
            for index in range(1, client_request.client.n):
                if client_request.ended[index] is None:
                    self.joins(client_request, index)

    def head(self) -> Place | None:
        """The first sequence that waits only for its turn."""
        aside: list[QueueKey] = []
        place = None
        while self._heap and place is None:
            order = self._heap[0]
            found = self.waiting.get(order)
            if found is None:
                heappop(self._heap)
            elif order in self.dropped or _is_held(*found):
                aside.append(heappop(self._heap))
            else:
                place = found
        for order in aside:
            heappush(self._heap, order)
        return place

    def admitted(self, client_request: SimulatedRequest, index: int) -> None:
        """34: only the head is admitted, and not before a dropped sequence that will return in front of it."""
        order, head = client_request.orders[index], self.head()
        if order not in self.waiting or order in self.dropped:
            raise InvariantBroken(f"{client_request.name}.{index} is admitted, and is not in line", invariant=34)
        if head is not None and head[0].orders[head[1]] < order:
            raise InvariantBroken(f"{client_request.name}.{index} overtook {head[0].name}.{head[1]}", invariant=34)
        if self.returns_before(order):
            raise InvariantBroken(f"{client_request.name}.{index} overtook one that was preempted", invariant=34)
        self.on_worker[order] = self.waiting.pop(order)

    def returns_before(self, order: QueueKey) -> bool:
        """Whether a more urgent sequence is being dropped, and has not returned to the queue yet."""
        return any(dropped < order for dropped in self.dropped)

    def is_dropped(self, client_request: SimulatedRequest, index: int, step: int) -> None:
        """Whether the sequence is dropped by this step, and has not ended."""
        order = client_request.orders[index]
        del self.on_worker[order]
        self.dropped[order] = step
        self.joins(client_request, index)

    def absorbed(self, step: int) -> None:
        """Forget the drops of this step, which are acknowledged."""
        if self.dropped:
            self.dropped = {order: dropped_by for order, dropped_by in self.dropped.items() if dropped_by > step}

    def ended(self, client_request: SimulatedRequest, index: int) -> None:
        order = client_request.orders[index]
        for places in (self.waiting, self.on_worker, self.dropped):
            places.pop(order, None)
        if index == 0:
            self.siblings_join(client_request)

    def worker_lost(self) -> None:
        self.dropped.clear()
        for client_request, index in list(self.on_worker.values()):
            self.joins(client_request, index)
        self.on_worker.clear()


def _is_held(client_request: SimulatedRequest, index: int) -> bool:
    return client_request.sequences[index].phase in (Phase.HELD, Phase.LOADING)
