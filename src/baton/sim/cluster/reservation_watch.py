"""Reservations that wait for room at a decode instance (67): the most urgent gets the room first, and none is refused before
its time.

53, as an outcome: a reservation that is more urgent than all that an instance holds gets its room in that very event. Every
sequence on the worker can be preempted for it, and the instance accepts no request that does not fit into the pool alone.

The watch follows the messages of one life of an engine: which requests asked for room, how urgent they are, how long they may
wait. It repeats no formula of the instance: that room was there is checked elsewhere (7, room_watch.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from baton.core.effects import Effect, Refuse
from baton.core.engine.phase import Phase
from baton.core.engine.request import Sequence
from baton.core.engine.view import SchedulerView
from baton.core.events import Event
from baton.errors import InvariantBroken
from baton.protocol.handoff import Reserve, Reserved
from baton.protocol.ids import Instant, RequestId
from baton.sim.engine import TIME_MARGIN, EngineWatch


class PendingReservation(NamedTuple):
    """A request that asked for room and has no answer."""

    priority: int
    arrival: float
    "Arrival of the first attempt, by the instance's clock."
    until: float

    def is_before(self, other: PendingReservation) -> bool:
        if self.priority != other.priority:
            return self.priority < other.priority
        return self.arrival < other.arrival - TIME_MARGIN


class ReservationWatch(EngineWatch):
    def __init__(self, view: SchedulerView, limit: int, saw: Callable[[str], None], *, by_priority: bool) -> None:
        """`limit`: the number of reservations that may wait."""
        self._view = view
        self._limit = limit
        self._saw = saw
        self._by_priority = by_priority
        self._asked: dict[RequestId, PendingReservation] = {}
        self._now = 0.0
        self._running: list[Sequence] = []
        "Before this event."
        self._fixed = False
        "Blocks were held before this event that no preemption makes available."

    def before(self, event: Event, now: Instant) -> None:
        self._now = max(self._now, now)
        self._fixed = self._holds_fixed()
        self._running = self._view.running()
        if type(event) is not Reserve:
            return
        request = event.request
        if any(sequence.attempt == request.attempt for sequence in self._view.sequences(request.id)):
            return  # only a lease renewal
        priority = request.priority if self._by_priority else 0
        self._asked[request.id] = PendingReservation(priority, now - request.age_seconds, self._now + event.wait_seconds)

    def handled(self, event: Event, effects: list[Effect]) -> None:
        if not self._asked:
            return
        answers = [effect for effect in effects if isinstance(effect, Reserved | Refuse)]
        answered = {answer.request for answer in answers}
        self._asked = {id: asked for id, asked in self._asked.items() if id in answered or self._view.is_open(id)}
        for answer in answers:
            asked = self._asked.pop(answer.request, None)
            if asked is None:
                continue
            if type(answer) is Reserved:
                self._granted(answer, asked)
            elif type(answer) is Refuse and answer.refused.reason == "no_room":
                self._refused(answer.request, asked)
        self._check_waiting()

    def _granted(self, answer: Reserved, asked: PendingReservation) -> None:
        if any(each.phase is Phase.PREEMPTING and each.priority > asked.priority for each in self._running):
            self._saw("a reservation preempted a less urgent sequence")
        if answer.waited_seconds:
            self._saw("a reservation waited for room, and got it")
        for other, waiting in self._asked.items():
            if waiting.is_before(asked):
                raise InvariantBroken(f"{answer.request} gets room before {other}, which is more urgent", invariant=67)
            if asked.priority < waiting.priority and asked.arrival > waiting.arrival:
                self._saw("an urgent reservation went first")

    def _refused(self, request: RequestId, asked: PendingReservation) -> None:
        self._check_urgent(request, asked)
        if asked.until <= self._now + TIME_MARGIN:
            return
        if len(self._asked) < self._limit or any(asked.is_before(other) for other in self._asked.values()):
            raise InvariantBroken(f"{request} is refused, and might wait until {asked.until:.3f}", invariant=67)

    def _check_waiting(self) -> None:
        load = self._view.load()
        for request, asked in self._asked.items():
            self._check_urgent(request, asked)
            if asked.until < self._now - TIME_MARGIN:
                raise InvariantBroken(f"{request} waits for room since its time has passed", invariant=67)
            if not (load.blocks_held or load.waiting or load.preempting):
                raise InvariantBroken(f"{request} waits for room, and nothing is held", invariant=67)

    def _check_urgent(self, request: RequestId, asked: PendingReservation) -> None:
        """53: nothing that is as urgent holds blocks or waits for them, and no move holds any."""
        view = self._view
        head = view.queue_head()
        others = [*view.running(), *view.preempting(), *([head] if head is not None else [])]
        if self._fixed or self._holds_fixed() or any(other.priority <= asked.priority for other in others):
            return
        if any(other.priority <= asked.priority for id, other in self._asked.items() if id != request):
            return
        raise InvariantBroken(f"{request} is more urgent than all others, fits alone, and gets no room", invariant=53)

    def _holds_fixed(self) -> bool:
        """Copies, leases and prompts kept for another instance hold blocks."""
        load = self._view.load()
        return bool(load.loading or load.kept)
