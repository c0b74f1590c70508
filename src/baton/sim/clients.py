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
from baton.sim.simulated_request import COMPLETE, SimulatedRequest
from baton.sim.timeline import Timeline

FRESH = 3
"""Small requests that come after healing, and must succeed."""
_NEVER = ("never_fits", "never_queued", "queue_full", "queue_tokens_full")


class Clients:
    def __init__(self, scenario: Scenario, timeline: Timeline, node: Node) -> None:
        self.watch = node.watch
        self._scenario = scenario
        self._timeline = timeline
        self._node = node
        self._submitting: tuple[SimulatedRequest, Refused | None] | None = None
        "A request that is on its way in, and the answer that it should get."
        self._sent_again = False
        self._leaving: list[SimulatedRequest] = []
        "Clients that leave when their request comes into a certain phase."
        self._fresh: list[SimulatedRequest] = []

    def begin(self) -> None:
        for client_request in self.watch.client_requests.values():
            client = client_request.client
            self._timeline.at(client.at, self._submit, client_request)
            if client.abort_at is not None:
                self._timeline.at(client.abort_at, self._abort, client_request)
            if client.again_at is not None:
                self._timeline.at(client.again_at, self._again, client_request)

    def heal(self) -> None:
        """Fresh requests come: they must succeed (`check_fresh`)."""
        for number in range(FRESH):
            client = Client(
                id=f"fresh{number}", at=self._timeline.now, prompt=[number % VOCAB], max_tokens=1 + number, seed=number
            )
            client_request = SimulatedRequest(client, weights_known=self.watch.weights_known)
            self.watch.add(client_request)
            self._fresh.append(client_request)
            self._submit(client_request)

    def check_fresh(self) -> None:
        """35: whatever happened before, a healthy instance serves."""
        for client_request in self._fresh:
            if client_request.refused not in _NEVER and not all(reason in COMPLETE for reason in client_request.ended):
                raise InvariantBroken(
                    f"{client_request.client.id}: {client_request.refused or client_request.ended} after everything was healed",
                    invariant=35,
                )

    def at_rest(self) -> None:
        """That everyone was answered is the watch's to say."""

    # What they do

    def _submit(self, client_request: SimulatedRequest) -> None:
        if self._waits(self._submit, client_request):
            return
        client = client_request.client
        self._timeline.note("client", f"{client.id} submits {len(client.prompt)} + {client.max_tokens}")
        client_request.submitted = True
        self._ask(client_request)
        if client.abort_in is not None and client_request.sequences:
            self._leaving.append(client_request)
            self._leave_in_phase()

    def _again(self, client_request: SimulatedRequest) -> None:
        """The same id once more. While the first is open: refused, and the first goes on untouched. After it: a new request."""
        if self._waits(self._again, client_request) or not client_request.submitted or client_request.refused:
            return
        if client_request.is_answered:
            self.watch.saw("an id was used again")
            client = client_request.client.next_user_of_id(self._timeline.now)
            other = SimulatedRequest(client, f"{client_request.name}'", self.watch.weights_known)
            self.watch.add(other)
            self._submit(other)
            return
        self._timeline.note("client", f"{client_request.client.id} submits again")
        self._sent_again = True
        self._ask(client_request)
        self._sent_again = False

    def _ask(self, client_request: SimulatedRequest) -> None:
        """Refused or not: as the reference says."""
        gone = self._node.instance.worker.state.value == "gone"
        self._submitting = (
            client_request,
            self.watch.reference.refusal(client_request.client, client_request.request.sampling, gone),
        )
        self._node.dispatch(Submit(client_request.request))

    def _abort(self, client_request: SimulatedRequest) -> None:
        if (
            self._waits(self._abort, client_request)
            or self.watch.client_requests[client_request.client.id] is not client_request
        ):
            return
        if not client_request.submitted:
            self.watch.saw("abort before submit")
            self._node.dispatch(Abort(RequestId(client_request.client.id)))
            return
        for sequence in client_request.sequences:
            self.watch.saw(f"abort while {sequence.phase.value}")
        if client_request.ended_at == self._timeline.now:
            self.watch.saw("abort in the tick of an end")
        client_request.aborted = True
        self._timeline.note("client", f"{client_request.client.id} leaves")
        self._node.dispatch(Abort(RequestId(client_request.client.id)))
        _must_have_ended(client_request, client_request.ended)

    def _stop_string(self, client_request: SimulatedRequest) -> None:
        if (
            self._waits(self._stop_string, client_request)
            or self.watch.client_requests[client_request.client.id] is not client_request
        ):
            return
        self.watch.saw("a stop string ended one sequence")
        self._node.dispatch(Abort(RequestId(client_request.client.id), client_request.client.n - 1, FinishReason.STOP))
        _must_have_ended(client_request, client_request.ended[-1:])

    def _waits(self, action: Callable[[SimulatedRequest], None], client_request: SimulatedRequest) -> bool:
        """The engine does not read: it will find the message later."""
        if self._node.frozen_until is None:
            return False
        self._timeline.at(self._node.frozen_until, action, client_request)
        return True

    # What they are told

    def answered(self, effects: list[Effect]) -> None:
        if self._submitting is None:
            return
        (client_request, expected), self._submitting = self._submitting, None
        got = next((effect.refused for effect in effects if type(effect) is Refuse), None)
        self.watch.reference.answered(client_request.client, expected, got)
        if got is None:
            self.watch.submitted(client_request)

    def refused(self, refuse: Refuse) -> None:
        self.watch.saw(f"refused: {refuse.refused.reason}")
        if not self._sent_again:
            self.watch.refused(refuse)

    def emitted(self, emit: Emit) -> None:
        note, now = self._timeline.note, self._timeline.now
        if self._timeline.traced:
            for request, _, index, _, token in each_token(emit.tokens):
                note("client", f"{request}.{index} gets {token}")
        for client_request in self.watch.take_stopped():
            self._timeline.at(now, self._stop_string, client_request)
        for ended in emit.ended:
            if self._timeline.traced:
                note("client", f"{ended.request}.{ended.index} ends: {ended.reason} {ended.detail}")
            client_request = self.watch.client_requests[ended.request]
            if client_request.client.abort_in == "end" and not client_request.aborted:
                self._timeline.at(now, self._abort, client_request)
            if (
                client_request in self._leaving
                and None not in client_request.ended
                and client_request.client.abort_in != "closing"
            ):
                self._leaving.remove(client_request)

    def after_event(self) -> None:
        if self._leaving:
            self._leave_in_phase()

    def _leave_in_phase(self) -> None:
        for client_request in list(self._leaving):
            if any(sequence.phase.value == client_request.client.abort_in for sequence in client_request.sequences):
                self._leaving.remove(client_request)
                client_request.aborted = True
                self._timeline.at(self._timeline.now, self._abort, client_request)


def _must_have_ended(client_request: SimulatedRequest, ended: list[FinishReason | None]) -> None:
    """22: an abort ends what is open in that very event."""
    if client_request.refused is None and None in ended:
        raise InvariantBroken(f"{client_request.client.id} was aborted and is still open", invariant=22)
