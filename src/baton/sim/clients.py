"""The clients: they submit, leave, send twice, see stop strings, and compare what they get with the undisturbed answer.

`Clients` is the same for every world. How a client reaches an instance is a subclass: directly (direct_clients.py), through a
router (cluster/routed_clients.py), or through the front of one engine (cluster/front.py). Numbers are those of
docs/internals/reliability.md.
"""

from __future__ import annotations

from baton.errors import InvariantBroken
from baton.protocol.output import Emit, Ended, each_token
from baton.protocol.request import FinishReason
from baton.sim.begun_watch import check_begun
from baton.sim.logprob_watch import LogprobWatch
from baton.sim.scenario import VOCAB, Client, Scenario
from baton.sim.simulated_request import COMPLETE, SimulatedRequest
from baton.sim.timeline import Timeline
from baton.sim.watch import Watch


class Clients:
    fresh = 4
    "Names of requests that are submitted after healing, and must succeed."

    def __init__(self, scenario: Scenario, timeline: Timeline, watch: Watch) -> None:
        self.open = 0
        "Requests that wait for an answer."
        self.to_come = len(scenario.clients)
        self.tokens = self.deliveries = 0
        self._scenario = scenario
        self._timeline = timeline
        self._watch = watch
        self._logprobs = LogprobWatch(watch.requests, watch.saw)
        self._fresh: list[SimulatedRequest] = []
        self._stopped: dict[str, None] = {}
        "Requests whose last sequence was withdrawn."
        self._quiet = not scenario.faults

    def begin(self) -> None:
        for number, request in enumerate(self._watch.all_requests):
            client = request.client
            self._timeline.at(client.at, self._submit, (request, number))
            for at, action in (
                (client.abort_at, self._leave),
                (client.again_at, self._submit_again),
                (client.stop_last_at, self._stop_last),
            ):
                if at is not None:
                    self._timeline.at(at, action, request)

    # Actions

    def _submit(self, entry: tuple[SimulatedRequest, int]) -> None:
        raise NotImplementedError

    def _leave(self, request: SimulatedRequest) -> None:
        raise NotImplementedError

    def _submit_again(self, request: SimulatedRequest) -> None:
        """Submit the same id once more: only a client that talks to an instance directly chooses its id."""

    def _withdraw(self, request: SimulatedRequest, index: int | None, reason: FinishReason) -> None:
        raise NotImplementedError

    def _stop_string(self, request: SimulatedRequest) -> None:
        """End the last sequence: the front of the client has seen a stop string in it."""
        if not request.is_answered and request.ended[-1] is None:
            self._watch.saw("a stop string ended one sequence")
            self._withdraw(request, request.client.n - 1, FinishReason.STOP)

    def _stop_last(self, request: SimulatedRequest) -> None:
        """End the last sequence, as the front does, and keep the others."""
        if request.submitted and not request.is_answered and request.ended[-1] is None:
            self._watch.saw("one sequence was withdrawn")
            self._stopped[request.client.id] = None
            self._withdraw(request, request.client.n - 1, FinishReason.STOP)

    # Answers

    def delivered(self, emit: Emit) -> None:
        """21: tokens are a prefix of the undisturbed output. 22, 23, 26: one end, with the right reason and usage."""
        self.deliveries += len(emit.tokens) + len(emit.ended)
        check_begun(emit, self._cached)
        sent = self._logprobs.sent(emit) if emit.logprobs else {}
        for id_, _, index, position, token in each_token(emit.tokens):
            request = self._watch.requests[id_]
            delivered = request.delivered[index]
            if position != len(delivered):
                raise InvariantBroken(f"{id_}.{index}: token {position} after {len(delivered)}", invariant=21)
            if request.ended[index] is not None or request.refused or not request.submitted:
                raise InvariantBroken(f"{id_}.{index} gets a token after its end, or before it came", invariant=22)
            if request.oracles[index].token(position) != token:
                raise InvariantBroken(f"{id_}.{index}: token {position} is {token}, not the undisturbed one", invariant=21)
            if request.client.logprobs is not None or request.client.prompt_logprobs is not None:
                entries = sent.get((id_, index))
                self._logprobs.expect(request, index, position, entries.pop(0) if entries else None)
            delivered.append(token)
            self._gets(request, index, token)
            if len(delivered) == request.client.stop_string_at and index == request.client.n - 1:
                self._timeline.at(self._timeline.now, self._stop_string, request)
        self.tokens += len(emit.tokens)
        self._tokens_are_in(emit)
        for ended in emit.ended:
            self._ended(ended)

    def _cached(self, request: str, index: int) -> int | None:
        """Prompt tokens that were found in a cache. None: not known."""
        return None

    def _gets(self, request: SimulatedRequest, index: int, token: int) -> None:
        """Hook: called after a token was checked and delivered."""

    def _tokens_are_in(self, emit: Emit) -> None:
        """Hook: called when all tokens of a message are checked, and none of its ends."""

    def _ended(self, ended: Ended) -> None:
        request, index = self._watch.requests[ended.request], ended.index
        client, delivered = request.client, request.delivered[index]
        if self._timeline.traced:
            self._note(f"{ended.request}.{index} ends: {ended.reason} {ended.detail}")
        if request.ended[index] is not None or request.refused or not request.submitted:
            raise InvariantBroken(f"{ended.request}.{index} ends twice, or before it came", invariant=22)
        request.ended[index] = ended.reason
        request.ended_at = self._timeline.now
        self._ends(request, ended)
        if (ended.prompt_tokens, ended.output_tokens) != (len(client.prompt), len(delivered)):
            raise InvariantBroken(f"{ended.request}.{index}: usage is {ended}", invariant=23)
        match ended.reason:
            case FinishReason.STOP if self._by_stop_string(request, index):
                pass
            case FinishReason.STOP | FinishReason.LENGTH | FinishReason.REPETITION:
                if delivered != request.oracles[index].complete() or ended.reason != request.oracles[index].reason:
                    raise InvariantBroken(f"{ended.request}.{index} ends by {ended.reason} too early or wrongly", invariant=26)
                self._completes(request, ended)
            case FinishReason.ABORT if not request.aborted and not self._may_be_drained():
                raise InvariantBroken(f"{ended.request}.{index} is aborted without an order", invariant=22)
            case FinishReason.TIMEOUT:
                self._timed_out(request, index)
            case FinishReason.ERROR:
                self._failed(request, index, ended)
        self._answered(request)

    def _by_stop_string(self, request: SimulatedRequest, index: int) -> bool:
        """Whether the front ended the sequence, at or (with tokens in flight) after the place, and not by a stop id of its
        own."""
        wanted, given = request.client.stop_string_at, request.delivered[index]
        if index != request.client.n - 1 or given == request.oracles[index].complete():
            return False
        return request.client.id in self._stopped or (wanted is not None and len(given) >= wanted)

    def _ends(self, request: SimulatedRequest, ended: Ended) -> None:
        """23: cached tokens are a part of the prompt."""
        if not 0 <= ended.host_tokens + ended.storage_tokens <= ended.cached_tokens < len(request.client.prompt):
            raise InvariantBroken(f"{ended.request}.{ended.index}: usage is {ended}", invariant=23)

    def _completes(self, request: SimulatedRequest, ended: Ended) -> None:
        """Hook: a sequence ended by itself."""

    def _may_be_drained(self) -> bool:
        return False

    def _timed_out(self, request: SimulatedRequest, index: int) -> None:
        raise NotImplementedError

    def _failed(self, request: SimulatedRequest, index: int, ended: Ended) -> None:
        raise NotImplementedError

    def _answered(self, request: SimulatedRequest) -> None:
        if request.is_answered:
            self.open -= 1

    def _end_all(self, request: SimulatedRequest) -> None:
        request.ended = [reason or FinishReason.ERROR for reason in request.ended]
        self._answered(request)

    # Afterwards

    def heal(self) -> None:
        """Submit fresh requests, which must succeed (`check_fresh`)."""
        for number in range(self.fresh):
            self.ask_fresh(self._fresh_client(number), number)

    def ask_fresh(self, client: Client, number: int) -> SimulatedRequest:
        request = SimulatedRequest(client, weights_known=self._watch.weights_known)
        self._watch.add(request)
        self._fresh.append(request)
        self.to_come += 1
        self._submit((request, number))
        return request

    def _fresh_client(self, number: int) -> Client:
        return Client(f"fresh{len(self._fresh)}", self._timeline.now, [number % VOCAB], 1 + number, seed=number)

    def check_fresh(self) -> None:
        """35: after healing, fresh requests are served, whatever happened before."""
        for request in self._fresh:
            if not self._may_be_refused(request) and not all(reason in COMPLETE for reason in request.ended):
                raise InvariantBroken(
                    f"{request.name}: {request.refused or request.ended} after everything was healed", invariant=35
                )

    def _may_be_refused(self, request: SimulatedRequest) -> bool:
        return False

    def at_rest(self) -> None:
        """22: all requests were answered; without faults, all that fit succeeded."""
        if left := self.unanswered():
            raise InvariantBroken(f"{left[0]} was never answered", invariant=22)
        for request in self._watch.all_requests if self._quiet else ():
            calm = request.client.timeout is None and request.refused is None
            if calm and not all(reason in COMPLETE for reason in request.ended):
                raise InvariantBroken(f"{request.name} did not succeed", invariant=22)

    def unanswered(self) -> list[str]:
        return [request.name for request in self._watch.all_requests if request.submitted and not request.is_answered]

    def _note(self, text: str) -> None:
        self._timeline.note("client", text)
