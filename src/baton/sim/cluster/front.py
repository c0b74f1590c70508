"""The front of one engine, rehearsed: the real machine (core/delivery/front.py) between clients and one instance.

The engine is lost, freezes, and comes back with the same or with other weights, while clients withdraw sequences and leave. The
instance and its wire are those of a cluster; the wire never fails by itself, as a socket between two processes does not.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from baton.core.delivery import front as machine
from baton.core.delivery.front import FrontEvent, FrontMachine
from baton.errors import InvariantBroken, Unavailable
from baton.protocol.control import InstanceReady, RefusedRequest
from baton.protocol.ids import Incarnation, Instant, RequestId, Slot
from baton.protocol.instance import InstanceHello, RouterHello
from baton.protocol.output import OTHER_WEIGHTS, Delta, Emit, Ended, TokenRow
from baton.protocol.request import FinishReason, GenerateRequest
from baton.protocol.step import RowLogprobs
from baton.sim.cluster.routed_clients import ClusterClients
from baton.sim.cluster.watch import ClusterWatch
from baton.sim.cluster.wires import HANGUP, Wire
from baton.sim.instance import SimulatedInstance
from baton.sim.scenario import Scenario
from baton.sim.simulated_request import SimulatedRequest
from baton.sim.tags import identity_of
from baton.sim.timeline import Timeline

NEVER: Final = 1e9
"""Seconds: a front has no heartbeats."""
MESSAGE_SECONDS: Final = 0.05
"""Longest time that a message is under way."""


class SinkWatch:
    """The sink of one request. It compares each delta with the undisturbed answer."""

    def __init__(self, front: FrontProcess, request: GenerateRequest) -> None:
        self._front = front
        self.request = request.id
        self._given = dict.fromkeys(request.wanted, 0)
        self._prompt: list[RowLogprobs] = []
        self.attempt = request.attempt

    def deliver(self, delta: Delta) -> None:
        position = self._given[delta.index]
        self._given[delta.index] += len(delta.tokens)
        rows: list[TokenRow] = [
            (self.request, self.attempt, delta.index, position + place, token) for place, token in enumerate(delta.tokens)
        ]
        begun = [] if delta.begun is None else [delta.begun]
        logprobs = [(self.request, 0, row) for row in self._prompt] if delta.index == 0 else []
        logprobs += [(self.request, delta.index, RowLogprobs(Slot(0), Incarnation(0), each)) for each in delta.logprobs]
        if delta.index == 0:
            self._prompt.clear()
        self._front.delivered(Emit(rows, [] if delta.ended is None else [delta.ended], logprobs, begun))

    def add_prompt(self, row: RowLogprobs) -> None:
        if row.prompt:
            self._prompt.append(replace(row, sampled=None))


class FrontProcess:
    """The front of `baton serve`. It never dies, since the server ends with it."""

    def __init__(self, scenario: Scenario, timeline: Timeline, watch: ClusterWatch) -> None:
        assert scenario.cluster is not None
        self.machine = FrontMachine()
        self._block_size, self._blocks = scenario.block_size, scenario.cluster.instances[0].blocks
        self.clients: FrontClients
        self._timeline = timeline
        self._watch = watch
        self._wire: Wire | None = None
        self._unread: list[tuple[Wire, Any]] = []
        "Messages of the next engine. The front reads a lost engine's messages to their end first."
        self._sinks: dict[RequestId, SinkWatch] = {}
        self._closing = False
        self._attempts: dict[RequestId, int] = {}
        "The last attempt of each request that was sent."
        self._refused: dict[RequestId, str] = {}
        "Why the engine refused a request."
        self._sent_over: dict[RequestId, Wire] = {}
        "The engine that each request was last sent to."
        self._sent_to: dict[RequestId, bytes] = {}
        "Identity of the engine that a request was sent to while its client had no token, by request."

    # The engine

    def arrived(self, wire: Wire, message: Any) -> None:
        if self._wire is None:
            self._wire = wire
        if wire is not self._wire:
            self._watch.saw("the next engine spoke before the lost one was read to its end")
            self._unread.append((wire, message))
            return
        if message is HANGUP:
            self._wire = None
            self._watch.saw("the front lost its engine")
            self._dispatch(machine.EngineLost("the engine was lost"))
            unread, self._unread = self._unread, []
            for entry in unread:
                self.arrived(*entry)
            return
        match message:
            case InstanceHello():
                wire.send("down", RouterHello("front", 0.25, NEVER))
                self._dispatch(machine.EngineReady(message.ready.identity))
            case Emit():
                self._carry_out(self.machine.take(message))
                self.machine.check()
            case InstanceReady():
                self._watch.saw("the engine reported other weights")
                self._dispatch(machine.WeightsChanged(message.identity))
            case RefusedRequest():
                self._refused[message.request] = message.refused.reason
                self._dispatch(machine.Reject(message.request, message.refused))

    # Clients

    def arrives(self, request: GenerateRequest) -> None:
        sink = self._sinks[request.id] = SinkWatch(self, request)
        self._dispatch(machine.ClientRequest(request, sink))

    def withdraw(self, event: machine.ClientWithdrawal) -> None:
        self._dispatch(event)

    def leaves(self, request: RequestId) -> None:
        self._dispatch(machine.Leave(request, self._sinks[request]))
        if request in self.machine.ledgers:
            raise InvariantBroken(f"{request} has left, and is kept", invariant=22)

    def close(self) -> None:
        """22: every open request ends with the error of the closing, and nothing is kept."""
        error, self._closing = Unavailable("the server stops"), True
        self._watch.saw("a front closed with open requests")
        self._dispatch(machine.Close(error))

    def delivered(self, emit: Emit) -> None:
        self._timeline.record(emit)
        self.clients.delivered(emit)

    # The machine

    def _dispatch(self, event: FrontEvent) -> None:
        self._carry_out(self.machine.handle(event, Instant(self._timeline.now)))
        self.machine.check()
        self._check_all_sent()

    def _check_sent_once(self, request: RequestId) -> None:
        """63: no engine computes a request twice."""
        if self._sent_over.get(request) is self._wire:
            raise InvariantBroken(f"{request} is sent again to an engine that has it", invariant=63)

    def _check_all_sent(self) -> None:
        """62: no request waits at the front while an engine is there."""
        for request in self.machine.ledgers if self.machine.away is None else ():
            if self._sent_over.get(request) is not self._wire:
                raise InvariantBroken(f"{request} waits, and the engine does not have it", invariant=62)

    def _carry_out(self, effects: list[machine.FrontEffect]) -> None:
        for effect in effects:
            match effect:
                case machine.SendRequest(request) | machine.Replay(request):
                    self._send(request)
                case machine.SendAbort(message):
                    self._post(message)
                case machine.End(sink, delta):
                    sink.deliver(delta)
                case machine.FailClient(sink, error):
                    self._failed(sink, str(error))
                case machine.RefuseClient(sink, refused):
                    if not self._is_true(sink.request, refused.reason) or any(self._watch.requests[sink.request].delivered):
                        raise InvariantBroken(f"{sink.request} is refused for nothing: {refused.reason}", invariant=22)
                    if refused.reason != "never_fits":
                        self._watch.saw("a request was refused, as the instance sleeps")
                    self.clients.failed(self._watch.requests[sink.request])

    def _is_true(self, request: RequestId, reason: str) -> bool:
        """22: a request is refused if and only if it is too large for the engine, or the instance drains or sleeps."""
        client = self._watch.requests[request].client
        if reason in ("draining", "paused"):
            return self.clients.sleeps
        needed = -(-(len(client.prompt) + client.max_tokens - 1) // self._block_size)
        return reason == "never_fits" and needed > self._blocks

    def _post(self, message: Any) -> None:
        if self._wire is None:
            raise InvariantBroken(f"{type(message).__name__} is sent, and no engine is there", invariant=43)
        self._timeline.record(message)
        self._wire.send("down", message)

    def _send(self, request: GenerateRequest) -> None:
        """Check and send a request. 32: an engine continues with what the client has. 43: each engine gets an attempt of its
        own."""
        asked = self._watch.requests[request.id]
        owed = [index for index, ended in enumerate(asked.ended) if ended is None]
        if list(request.wanted) != owed:
            raise InvariantBroken(f"{request.id} is sent for {list(request.wanted)}, and owes {owed}", invariant=32)
        for index in request.wanted:
            if list(request.delivered(index)) != asked.delivered[index]:
                raise InvariantBroken(f"{request.id}.{index} is sent with other tokens than its client has", invariant=32)
        attempt = self._attempts.get(request.id, 0)
        if request.attempt <= attempt:
            raise InvariantBroken(f"{request.id}: attempt {request.attempt} is sent after {attempt}", invariant=43)
        self._check_sent_once(request.id)
        self._post(request)
        if self._wire is not None:
            self._sent_over[request.id] = self._wire
        self._attempts[request.id] = request.attempt
        assert self.machine.identity is not None
        self._sent_to.setdefault(request.id, self.machine.identity)
        if not any(asked.delivered):  # the answer begins anew
            self._sent_to[request.id] = self.machine.identity
        self._sinks[request.id].attempt = request.attempt

    def _failed(self, sink: SinkWatch, why: str) -> None:
        """22, 59: a request fails only without an engine, before it began; or with other weights, after that."""
        asked = self._watch.requests[sink.request]
        if why == OTHER_WEIGHTS:
            begun = self._sent_to[sink.request] if asked.weights is None else identity_of(asked.weights)
            if begun == self.machine.identity or not any(asked.delivered):
                raise InvariantBroken(f"{asked.name} ends, and could go on with its weights", invariant=59)
            self._watch.saw("an answer ended, as other weights are served")
        elif self._closing and why == "the server stops":
            pass
        elif self._refused.get(sink.request) in ("draining", "paused") and self._attempts[sink.request] > 1:
            if not self.clients.sleeps:
                raise InvariantBroken(f"the replay of {asked.name} is refused for nothing: {why}", invariant=22)
            self._watch.saw("a replay was refused, as the instance sleeps")
        elif self.machine.away is None or sink.request in self._attempts:
            raise InvariantBroken(f"{asked.name} fails for nothing: {why}", invariant=22)
        else:
            self._watch.saw("no engine was there")
        self.clients.failed(asked)


class FrontClients(ClusterClients):
    """Every second client that goes closes its connection; the others ask for an abort, and get their end."""

    def __init__(
        self, scenario: Scenario, timeline: Timeline, watch: ClusterWatch, front: FrontProcess, instance: SimulatedInstance
    ) -> None:
        super().__init__(scenario, timeline, watch)
        self._front = front
        self._instance = instance

    @property
    def sleeps(self) -> bool:
        """The instance drains or sleeps, or did when what arrives now was sent."""
        return any(self._timeline.now <= drain.end + MESSAGE_SECONDS for drain in self._instance.drains)

    def _may_be_drained(self) -> bool:
        now, drains = self._timeline.now, self._instance.drains
        if not any(drain.deadline <= now <= drain.end + MESSAGE_SECONDS for drain in drains):
            return False
        self._watch.saw("an answer was ended, as the instance is to sleep")
        return True

    def _submit(self, entry: tuple[SimulatedRequest, int]) -> None:
        self.to_come -= 1
        self._arrives(entry[0], 0)
        self._front.arrives(entry[0].request)

    def leave(self, request: str) -> None:
        asked = self._watch.requests[request]
        if not asked.submitted or asked.is_answered or asked.aborted:
            return
        asked.aborted = True
        self._watch.saw("a client left" if self._front.machine.away is None else "a client left without an engine")
        if asked.client.seed % 2:
            self._withdraw(asked, None, FinishReason.ABORT)
            return
        asked.ended = [reason or FinishReason.ABORT for reason in asked.ended]
        self._answered(asked)
        self._front.leaves(RequestId(request))

    def _withdraw(self, request: SimulatedRequest, index: int | None, reason: FinishReason) -> None:
        self._front.withdraw(machine.ClientWithdrawal(RequestId(request.client.id), index, reason))

    def _failed(self, request: SimulatedRequest, index: int, ended: Ended) -> None:
        """59: the engine ends requests that its worker cannot continue."""
        if ended.detail != OTHER_WEIGHTS:
            super()._failed(request, index, ended)
        elif request.weights in (None, self._instance.loaded) and not any(r for r in request.ended if r is not ended.reason):
            raise InvariantBroken(f"{request.name}.{index} ends, and could go on with its weights", invariant=59)
        self._watch.saw("an answer ended, as other weights are served")

    def close(self) -> None:
        """Close the server with open requests, and submit another one after that: all fail, and soon."""
        self.heal()
        self._front.close()
        self.heal()
        if self.open or self._front.machine.ledgers:
            raise InvariantBroken(f"the front is closed, and {self.unanswered()} are open", invariant=22)

    def failed(self, request: SimulatedRequest) -> None:
        if request.weights is None and not any(request.ended):
            request.refused = "no engine"
            self._answered(request)
        else:
            self._end_all(request)
