"""Clients that talk to a plain instance, without a router.

Their requests reach the instance in the moment that they are sent, unless it is frozen. So the answer to each is known exactly
(instance_watch.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.core.effects import Effect, Refuse
from baton.core.events import Abort, Submit
from baton.errors import InvariantBroken
from baton.protocol.ids import RequestId
from baton.protocol.output import Emit, Ended
from baton.protocol.request import FinishReason, Refused
from baton.sim.clients import Clients
from baton.sim.instance import SimulatedInstance
from baton.sim.instance_watch import InstanceWatch
from baton.sim.scenario import Scenario
from baton.sim.simulated_request import SimulatedRequest
from baton.sim.timeline import Timeline


class DirectClients(Clients):
    fresh = 3

    def __init__(self, scenario: Scenario, timeline: Timeline, watch: InstanceWatch, instance: SimulatedInstance) -> None:
        super().__init__(scenario, timeline, watch)
        self.watch = watch
        self._instance = instance
        self._submitting: tuple[SimulatedRequest, Refused | None] | None = None
        "Requests that are being submitted, and their expected answers."
        self._sent_again = False
        self._leaving: list[SimulatedRequest] = []
        "Clients that leave when their request enters a certain phase."

    # Actions

    def _submit(self, entry: tuple[SimulatedRequest, int]) -> None:
        request, client = entry[0], entry[0].client
        if self._waits(self._submit, entry):
            return
        self.to_come -= 1
        self._note(f"{client.id} submits {len(client.prompt)} + {client.max_tokens}")
        request.submitted = True
        self.open += 1
        self._ask(request)
        if client.abort_in is not None and request.sequences:
            self._leaving.append(request)
            self.after_event()

    def _submit_again(self, request: SimulatedRequest) -> None:
        """Submit the same id once more. While the first is open: refused, and the first continues. After it: a new request."""
        if self._waits(self._submit_again, request) or not request.submitted or request.refused:
            return
        if request.is_answered:
            self._watch.saw("an id was used again")
            other = SimulatedRequest(
                request.client.next_user_of_id(self._timeline.now), f"{request.name}'", self._watch.weights_known
            )
            self._watch.add(other)
            self.to_come += 1
            self._submit((other, 0))
            return
        self._note(f"{request.client.id} submits again")
        self._sent_again = True
        self._ask(request)
        self._sent_again = False

    def _ask(self, request: SimulatedRequest) -> None:
        """Submit the request; the reference knows whether it is refused, and why."""
        gone = self.watch.machine.worker.state.value == "gone"
        self._submitting = request, self.watch.reference.refusal(request.client, request.request.sampling, gone)
        self._dispatch(Submit(request.request))

    def _leave(self, request: SimulatedRequest) -> None:
        if self._waits(self._leave, request) or self._watch.requests[request.client.id] is not request:
            return
        if not request.submitted:
            self._watch.saw("abort before submit")
            self._dispatch(Abort(RequestId(request.client.id)))
            return
        for sequence in request.sequences:
            self._watch.saw(f"abort while {sequence.phase.value}")
        if request.ended_at == self._timeline.now:
            self._watch.saw("abort in the tick of an end")
        request.aborted = True
        self._note(f"{request.client.id} leaves")
        self._withdraw(request, None, FinishReason.ABORT)

    def _withdraw(self, request: SimulatedRequest, index: int | None, reason: FinishReason) -> None:
        """22: an abort ends the open sequences in the same event."""
        self._dispatch(
            Abort(RequestId(request.client.id), index, FinishReason.STOP if reason is FinishReason.STOP else FinishReason.ABORT)
        )
        if request.refused is None and None in (request.ended if index is None else request.ended[index : index + 1]):
            raise InvariantBroken(f"{request.client.id} was aborted and is still open", invariant=22)

    def _stop_string(self, request: SimulatedRequest) -> None:
        if self._waits(self._stop_string, request) or self._watch.requests[request.client.id] is not request:
            return
        self._watch.saw("a stop string ended one sequence")
        self._withdraw(request, request.client.n - 1, FinishReason.STOP)

    def _stop_last(self, request: SimulatedRequest) -> None:
        if not self._waits(self._stop_last, request) and self._watch.requests[request.client.id] is request:
            super()._stop_last(request)

    def _waits(self, action: Callable[[Any], None], argument: object) -> bool:
        """Whether the engine is frozen: it finds the message later."""
        if (until := self._instance.frozen_until) is None:
            return False
        self._timeline.at(until, action, argument)
        return True

    def _dispatch(self, event: Submit | Abort) -> None:
        assert self._instance.engine is not None
        self._instance.engine.dispatch(event)

    # Answers

    def answered(self, effects: list[Effect]) -> None:
        """Compare the effects of an event with the reference, before any of them is performed."""
        if self._submitting is None:
            return
        (request, expected), self._submitting = self._submitting, None
        got = next((effect.refused for effect in effects if type(effect) is Refuse), None)
        self.watch.reference.answered(request.client, expected, got)
        if got is None:
            self.watch.submitted(request)

    def refused(self, refuse: Refuse) -> None:
        """Check a refusal, which must be the only answer."""
        self._note(f"{refuse.request} refused: {refuse.refused.reason}")
        self._watch.saw(f"refused: {refuse.refused.reason}")
        if self._sent_again:
            return
        request = self._watch.requests[refuse.request]
        if any(request.delivered) or any(request.ended) or request.refused:
            raise InvariantBroken(f"{refuse.request} is refused after it was answered", invariant=22)
        if not str(refuse.refused):
            raise InvariantBroken("a refusal says nothing", invariant=22)
        request.refused = refuse.refused.reason
        self._answered(request)

    def delivered(self, emit: Emit) -> None:
        super().delivered(emit)
        for ended in emit.ended:
            request = self._watch.requests[ended.request]
            if request.client.abort_in == "end" and not request.aborted:
                self._timeline.at(self._timeline.now, self._leave, request)
            if request in self._leaving and None not in request.ended and request.client.abort_in != "closing":
                self._leaving.remove(request)

    def after_event(self) -> None:
        for request in list(self._leaving):
            if any(sequence.phase.value == request.client.abort_in for sequence in request.sequences):
                self._leaving.remove(request)
                request.aborted = True
                self._timeline.at(self._timeline.now, self._leave, request)

    def _cached(self, request: str, index: int) -> int | None:
        return self._watch.requests[request].hit[index] or 0

    def _gets(self, request: SimulatedRequest, index: int, token: int) -> None:
        if self._timeline.traced:
            self._note(f"{request.client.id}.{index} gets {token}")
        self.watch.gets(request, index, token)

    def _tokens_are_in(self, emit: Emit) -> None:
        self.watch.take_in(given=bool(emit.tokens))

    def _ends(self, request: SimulatedRequest, ended: Ended) -> None:
        self.watch.ends(request, ended)

    def _completes(self, request: SimulatedRequest, ended: Ended) -> None:
        self.watch.completes(request, ended)

    def _may_be_drained(self) -> bool:
        return self.watch.reference.may_be_drained()

    def _timed_out(self, request: SimulatedRequest, index: int) -> None:
        if not self.watch.reference.may_time_out(request.client):
            raise InvariantBroken(f"{request.name}.{index} times out before its deadline", invariant=22)
        waited = request.hit[index] is None
        self._watch.saw("a deadline passed in the queue" if waited else "a deadline passed on the worker")

    def _failed(self, request: SimulatedRequest, index: int, ended: Ended) -> None:
        self.watch.failed(request, index, ended)

    def _may_be_refused(self, request: SimulatedRequest) -> bool:
        """Whether the refusal is for size: the request is larger than the pool or a plan, or the queue is full."""
        return request.refused in ("never_fits", "never_planned", "never_queued", "queue_full", "queue_tokens_full")
