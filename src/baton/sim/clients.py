"""The clients and their front: they submit, leave at a time or in a phase, send twice, see stop strings."""

from __future__ import annotations

from collections.abc import Callable

from baton.core.effects import Effect, Refuse
from baton.core.events import Abort, Submit
from baton.errors import InvariantBroken
from baton.protocol.ids import RequestId
from baton.protocol.output import Emit, each_token
from baton.protocol.request import FinishReason, Refused
from baton.sim.node import Node
from baton.sim.scenario import VOCAB, Client, Scenario
from baton.sim.timeline import Timeline
from baton.sim.trip import COMPLETE, Trip

FRESH = 3
"""Small requests that come after healing, and must succeed."""
_NEVER = ("never_fits", "never_queued", "queue_full", "queue_tokens_full")


class Clients:
    def __init__(self, scenario: Scenario, timeline: Timeline, node: Node) -> None:
        self.watch = node.watch
        self._scenario = scenario
        self._timeline = timeline
        self._node = node
        self._submitting: tuple[Trip, Refused | None] | None = None
        "A request that is on its way in, and the answer that it should get."
        self._sent_again = False
        self._leaving: list[Trip] = []
        "Clients that leave when their request comes into a certain phase."
        self._fresh: list[Trip] = []

    def begin(self) -> None:
        for trip in self.watch.trips.values():
            client = trip.client
            self._timeline.at(client.at, self._submit, trip)
            if client.abort_at is not None:
                self._timeline.at(client.abort_at, self._abort, trip)
            if client.again_at is not None:
                self._timeline.at(client.again_at, self._again, trip)

    def heal(self) -> None:
        """Fresh requests come: they must succeed (`check_fresh`)."""
        for number in range(FRESH):
            client = Client(
                id=f"fresh{number}", at=self._timeline.now, prompt=[number % VOCAB], max_tokens=1 + number, seed=number
            )
            trip = Trip(client, weights_known=self.watch.weights_known)
            self.watch.add(trip)
            self._fresh.append(trip)
            self._submit(trip)

    def check_fresh(self) -> None:
        """35: whatever happened before, a healthy instance serves."""
        for trip in self._fresh:
            if trip.refused not in _NEVER and not all(reason in COMPLETE for reason in trip.ended):
                raise InvariantBroken(
                    f"{trip.client.id}: {trip.refused or trip.ended} after everything was healed", invariant=35
                )

    def at_rest(self) -> None:
        """That everyone was answered is the watch's to say."""

    # What they do

    def _submit(self, trip: Trip) -> None:
        if self._waits(self._submit, trip):
            return
        client = trip.client
        self._timeline.note("client", f"{client.id} submits {len(client.prompt)} + {client.max_tokens}")
        trip.submitted = True
        self._ask(trip)
        if client.abort_in is not None and trip.sequences:
            self._leaving.append(trip)
            self._leave_in_phase()

    def _again(self, trip: Trip) -> None:
        """The same id once more. While the first is open: refused, and the first goes on untouched. After it: a new request."""
        if self._waits(self._again, trip) or not trip.submitted or trip.refused:
            return
        if trip.is_answered:
            self.watch.saw("an id was used again")
            client = trip.client.next_user_of_id(self._timeline.now)
            other = Trip(client, f"{trip.name}'", self.watch.weights_known)
            self.watch.add(other)
            self._submit(other)
            return
        self._timeline.note("client", f"{trip.client.id} submits again")
        self._sent_again = True
        self._ask(trip)
        self._sent_again = False

    def _ask(self, trip: Trip) -> None:
        """Refused or not: as the reference says."""
        gone = self._node.instance.worker.state.value == "gone"
        self._submitting = trip, self.watch.reference.refusal(trip.client, trip.request.sampling, gone)
        self._node.tell(Submit(trip.request))

    def _abort(self, trip: Trip) -> None:
        if self._waits(self._abort, trip) or self.watch.trips[trip.client.id] is not trip:
            return
        if not trip.submitted:
            self.watch.saw("abort before submit")
            self._node.tell(Abort(RequestId(trip.client.id)))
            return
        for sequence in trip.sequences:
            self.watch.saw(f"abort while {sequence.phase.value}")
        if trip.ended_at == self._timeline.now:
            self.watch.saw("abort in the tick of an end")
        trip.aborted = True
        self._timeline.note("client", f"{trip.client.id} leaves")
        self._node.tell(Abort(RequestId(trip.client.id)))
        _must_have_ended(trip, trip.ended)

    def _stop_string(self, trip: Trip) -> None:
        if self._waits(self._stop_string, trip) or self.watch.trips[trip.client.id] is not trip:
            return
        self.watch.saw("a stop string ended one sequence")
        self._node.tell(Abort(RequestId(trip.client.id), trip.client.n - 1, FinishReason.STOP))
        _must_have_ended(trip, trip.ended[-1:])

    def _waits(self, action: Callable[[Trip], None], trip: Trip) -> bool:
        """The engine does not read: it will find the message later."""
        if self._node.frozen_until is None:
            return False
        self._timeline.at(self._node.frozen_until, action, trip)
        return True

    # What they are told

    def answered(self, effects: list[Effect]) -> None:
        if self._submitting is None:
            return
        (trip, expected), self._submitting = self._submitting, None
        got = next((effect.refused for effect in effects if type(effect) is Refuse), None)
        self.watch.reference.answered(trip.client, expected, got)
        if got is None:
            self.watch.submitted(trip)

    def refused(self, refuse: Refuse) -> None:
        self.watch.saw(f"refused: {refuse.refused.reason}")
        if not self._sent_again:
            self.watch.refused(refuse)

    def emitted(self, emit: Emit) -> None:
        note, now = self._timeline.note, self._timeline.now
        if self._timeline.traced:
            for request, _, index, _, token in each_token(emit.tokens):
                note("client", f"{request}.{index} gets {token}")
        for trip in self.watch.take_stopped():
            self._timeline.at(now, self._stop_string, trip)
        for ended in emit.ended:
            if self._timeline.traced:
                note("client", f"{ended.request}.{ended.index} ends: {ended.reason} {ended.detail}")
            trip = self.watch.trips[ended.request]
            if trip.client.abort_in == "end" and not trip.aborted:
                self._timeline.at(now, self._abort, trip)
            if trip in self._leaving and None not in trip.ended and trip.client.abort_in != "closing":
                self._leaving.remove(trip)

    def after_event(self) -> None:
        if self._leaving:
            self._leave_in_phase()

    def _leave_in_phase(self) -> None:
        for trip in list(self._leaving):
            if any(sequence.phase.value == trip.client.abort_in for sequence in trip.sequences):
                self._leaving.remove(trip)
                trip.aborted = True
                self._timeline.at(self._timeline.now, self._abort, trip)


def _must_have_ended(trip: Trip, ended: list[FinishReason | None]) -> None:
    """22: an abort ends what is open in that very event."""
    if trip.refused is None and None in ended:
        raise InvariantBroken(f"{trip.client.id} was aborted and is still open", invariant=22)
