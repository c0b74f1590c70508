"""The clients of a cluster: each speaks with one router, and holds what it is told against the undisturbed answer."""

from __future__ import annotations

from baton.core.cluster.events import FailRequest, RejectRequest, SubmitRequest, WithdrawRequest
from baton.errors import InvariantBroken
from baton.protocol.ids import RequestId
from baton.protocol.output import OTHER_WEIGHTS, Emit, Ended, each_token
from baton.protocol.request import FinishReason
from baton.sim.begun_watch import check_begun
from baton.sim.cluster.router import SimulatedRouter
from baton.sim.cluster.watch import ClusterWatch
from baton.sim.logprob_watch import LogprobWatch
from baton.sim.scenario import VOCAB, Client, Scenario
from baton.sim.simulated_request import COMPLETE, SimulatedRequest
from baton.sim.timeline import Timeline

FRESH = 4
AFTERMATH_SECONDS = 10.0
TIMEOUT_MARGIN = 1.1
"""Clocks may differ by a hundredth, and an instance that times out tells its router, which tells the client."""


class RequestBegun:
    """What a client remembers of the moment when it came."""

    __slots__ = ("at", "broken", "last_at", "router", "silences")

    def __init__(self, router: int, at: float) -> None:
        self.router = router
        self.at = at
        self.last_at = at
        "When a token came last."
        self.silences = 0
        "Times that nothing came for as long as a router may wait."
        self.broken = False
        "Its router died: it hears nothing more, and nobody is to blame."

    def hears(self, now: float, patience: float) -> None:
        """A token, or an end."""
        self.silences += int((now - self.last_at) / patience)
        self.last_at = now


class ClusterClients:
    def __init__(self, scenario: Scenario, timeline: Timeline, watch: ClusterWatch, routers: list[SimulatedRouter]) -> None:
        assert scenario.cluster is not None
        self.open = 0
        "Requests that are owed an answer."
        self.to_come = len(scenario.clients)
        self.tokens = self.deliveries = 0
        self._scenario = scenario
        self._cluster = scenario.cluster
        self._timeline = timeline
        self._watch = watch
        self._routers = routers
        self._logprobs = LogprobWatch(watch.client_requests, watch.saw)
        self._begun: dict[str, RequestBegun] = {}
        self._stopped: dict[str, None] = {}
        "Whose last sequence was withdrawn by its front."
        self._patience = 0.97 * min(self._cluster.silence_seconds_max, self._cluster.prefill_seconds_max)
        "Clocks differ."
        self._fresh: list[SimulatedRequest] = []
        cluster = scenario.cluster
        patient = min(cluster.silence_seconds_max, cluster.prefill_seconds_max, cluster.queue_seconds_max) >= 300.0
        self._quiet = not scenario.faults and patient
        self._rough = sum(len(node.steps) + len(node.cache_faults) for node in self._cluster.nodes)
        self._rough += 10 * sum(client.poison_at is not None for client in scenario.clients)
        "Faults of workers and copies, whenever they come. Poison takes several workers with it."

    def begin(self) -> None:
        for number, client_request in enumerate(self._watch.all_trips):
            self._timeline.at(client_request.client.at, self._submit, (client_request, number % len(self._routers)))
            if client_request.client.abort_at is not None:
                self._timeline.at(client_request.client.abort_at, self._leave_at, client_request)
            if client_request.client.stop_last_at is not None:
                self._timeline.at(client_request.client.stop_last_at, self._stop_last, client_request)

    # What they do

    def _submit(self, entry: tuple[SimulatedRequest, int]) -> None:
        client_request, router = entry
        self.to_come -= 1
        for other in (*range(router, len(self._routers)), *range(router)):  # whoever finds no router tries the next
            if self._routers[other].machine is not None:
                self._ask(client_request, other)
                return
        self._watch.saw("no router was there")
        client_request.refused = "nobody"

    def _ask(self, client_request: SimulatedRequest, router: int) -> None:
        request = client_request.client.id
        client = client_request.client
        self._note(f"{request} asks router {router}: {len(client.prompt)} + {client.max_tokens} x {client.n}")
        client_request.submitted = True
        self.open += 1
        self._begun[request] = RequestBegun(router, self._timeline.now)
        self._watch.arrives(request, router)
        process = self._routers[router]
        if process.machine is not None:
            process.submit(SubmitRequest(client_request.request))
        elif not self._begun[request].broken:
            self.router_died(router)  # in the very moment of its arrival

    def _leave_at(self, client_request: SimulatedRequest) -> None:
        self.leave(client_request.client.id)

    def leave(self, request: str) -> None:
        """The client is gone."""
        client_request = self._watch.client_requests[request]
        if not client_request.submitted or client_request.is_answered or client_request.aborted:
            return
        client_request.aborted = True
        self._watch.saw("a client left")
        self._withdraw(client_request, WithdrawRequest(RequestId(request)))

    def _withdraw(self, client_request: SimulatedRequest, event: WithdrawRequest) -> None:
        process = self._routers[self._begun[client_request.client.id].router]
        if process.machine is not None:
            process.submit(event)

    def _stop_string(self, client_request: SimulatedRequest) -> None:
        if not client_request.is_answered and client_request.ended[-1] is None:
            self._watch.saw("a stop string ended one sequence")
            if client_request.client.id in self._watch.replayed:
                self._watch.saw("a stop string after a replay")
            self._withdraw(
                client_request,
                WithdrawRequest(RequestId(client_request.client.id), client_request.client.n - 1, FinishReason.STOP),
            )

    def _stop_last(self, client_request: SimulatedRequest) -> None:
        """Its front ends the last sequence, and keeps the others."""
        if (
            client_request.submitted
            and not client_request.is_answered
            and client_request.ended[-1] is None
            and not client_request.refused
        ):
            self._watch.saw("one sequence was withdrawn")
            self._stopped[client_request.client.id] = None
            self._withdraw(
                client_request,
                WithdrawRequest(RequestId(client_request.client.id), client_request.client.n - 1, FinishReason.STOP),
            )

    # What they are told

    def delivered(self, emit: Emit) -> None:
        """21: tokens are a prefix of the undisturbed output. 22, 23, 26: one end, with the right reason and usage."""
        self.deliveries += len(emit.tokens) + len(emit.ended)
        self._watch.delivered(emit)
        check_begun(emit, lambda request, index: None)
        sent = self._logprobs.sent(emit) if emit.logprobs else {}
        for request, _, index, position, token in each_token(emit.tokens):
            client_request = self._watch.client_requests[request]
            self._begun[request].hears(self._timeline.now, self._patience)
            delivered = client_request.delivered[index]
            if position != len(delivered):
                raise InvariantBroken(f"{request}.{index}: token {position} after {len(delivered)}", invariant=21)
            if client_request.ended[index] is not None or client_request.refused or self._begun[request].broken:
                raise InvariantBroken(f"{request}.{index} gets a token after its end", invariant=22)
            if client_request.oracles[index].token(position) != token:
                raise InvariantBroken(f"{request}.{index}: token {position} is {token}, not the undisturbed one", invariant=21)
            if client_request.client.logprobs is not None or client_request.client.prompt_logprobs is not None:
                entries = sent.get((request, index))
                self._logprobs.expect(client_request, index, position, entries.pop(0) if entries else None)
            delivered.append(token)
            if len(delivered) == client_request.client.stop_string_at and index == client_request.client.n - 1:
                self._timeline.at(self._timeline.now, self._stop_string, client_request)
        self.tokens += len(emit.tokens)
        for ended in emit.ended:
            self._ended(ended)

    def _ended(self, ended: Ended) -> None:
        client_request = self._watch.client_requests[ended.request]
        index, client, delivered = ended.index, client_request.client, client_request.delivered[ended.index]
        self._note(f"{ended.request}.{index} ends: {ended.reason} {ended.detail}")
        if client_request.ended[index] is not None or client_request.refused:
            raise InvariantBroken(f"{ended.request}.{index} ends twice", invariant=22)
        client_request.ended[index] = ended.reason
        if (ended.prompt_tokens, ended.output_tokens) != (len(client.prompt), len(delivered)):
            raise InvariantBroken(f"{ended.request}.{index}: usage is {ended}", invariant=23)
        if not 0 <= ended.host_tokens + ended.storage_tokens <= ended.cached_tokens < len(client.prompt):
            raise InvariantBroken(f"{ended.request}.{index}: usage is {ended}", invariant=23)
        match ended.reason:
            case FinishReason.STOP if self._by_stop_string(client_request, index):
                pass
            case FinishReason.STOP | FinishReason.LENGTH | FinishReason.REPETITION:
                if (
                    delivered != client_request.oracles[index].complete()
                    or ended.reason != client_request.oracles[index].reason
                ):
                    raise InvariantBroken(f"{ended.request}.{index} ends by {ended.reason} too early or wrongly", invariant=26)
            case FinishReason.ABORT if not client_request.aborted:
                raise InvariantBroken(f"{ended.request}.{index} is aborted by nobody", invariant=22)
            case FinishReason.TIMEOUT:
                self._timed_out(client_request)
            case FinishReason.ERROR:
                self._failed(client_request, index, ended)
        self._answered(client_request)

    def _by_stop_string(self, client_request: SimulatedRequest, index: int) -> bool:
        if index == client_request.client.n - 1 and client_request.client.id in self._stopped:
            return client_request.delivered[index] != client_request.oracles[index].complete()
        wanted = client_request.client.stop_string_at
        ours = wanted is not None and index == client_request.client.n - 1 and len(client_request.delivered[index]) >= wanted
        return ours and client_request.delivered[index] != client_request.oracles[index].complete()

    def _timed_out(self, client_request: SimulatedRequest) -> None:
        timeout, waited = client_request.client.timeout, self._timeline.now - self._begun[client_request.client.id].at
        if timeout is None or waited < timeout / TIMEOUT_MARGIN:
            raise InvariantBroken(f"{client_request.name} times out after {waited:.3f} s, not {timeout}", invariant=22)
        self._watch.saw("a request timed out")

    def _failed(self, client_request: SimulatedRequest, index: int, ended: Ended) -> None:
        outputs, client = len(client_request.delivered[index]), client_request.client
        if client.nan_at == outputs and ended.error == "row_failed":
            self._watch.saw("one row failed, alone")
        elif ended.error == "poison" and (client.poison_at is not None or self._disturbances(client_request) > 1):
            self._watch.saw("a poisonous request was given up")
        else:
            raise InvariantBroken(f"{ended.request}.{index} fails for nothing: {ended.error} {ended.detail}", invariant=22)

    def turned_away(self, effect: RejectRequest) -> None:
        client_request = self._watch.client_requests[effect.request]
        if any(client_request.delivered) or any(client_request.ended) or client_request.refused:
            raise InvariantBroken(f"{effect.request} is turned away after it was answered", invariant=22)
        self._note(f"{effect.request} is turned away: {effect.refused.reason}")
        self._watch.saw(f"turned away: {effect.refused.reason}")
        client_request.refused = effect.refused.reason
        self._earned(client_request, effect.refused.reason)
        self._answered(client_request)

    def _earned(self, client_request: SimulatedRequest, reason: str) -> None:
        """22: nobody is turned away without a reason that is true."""
        cluster, client, size = self._cluster, client_request.client, self._scenario.block_size
        needed = -(-(len(client.prompt) + client.max_tokens - 1) // size)
        calm = not self._disturbances(client_request)
        router, begun = self._routers[self._begun[client.id].router], self._begun[client.id]
        match reason:
            case "never_fits":
                missed = self._timeline.now - router.seen_with(needed)
                ok = missed > router.config.no_instance_seconds * 0.97  # clocks differ
            case "queue_full" if self._timeline.now - begun.at > cluster.queue_seconds_max * 0.97:
                ok = True
            case "queue_full" | "queue_tokens_full" | "never_queued":
                ok = cluster.router_queue_max < 1024 or not calm
            case _:
                ok = not calm
        if not ok:
            raise InvariantBroken(f"{client_request.name} is turned away for nothing: {reason}", invariant=22)

    def broken_off(self, effect: FailRequest) -> None:
        """An error is allowed where instances were lost again and again, or nobody was there for long."""
        client_request, begun = self._watch.client_requests[effect.request], self._begun[effect.request]
        self._note(f"{effect.request} is broken off: {effect.detail}")
        if effect.detail == OTHER_WEIGHTS:
            self._other_weights(client_request, self._routers[begun.router])
            return
        waited, lost = self._timeline.now - begun.at, self._losses(client_request)
        nobody = self._disturbances(client_request) and waited > 9.0
        nobody = nobody or waited > self._cluster.queue_seconds_max * 0.97
        begun.hears(self._timeline.now, self._patience)
        lost += begun.silences
        if effect.error != "worker_gone" or not (lost > self._cluster.migrations_max or nobody):
            raise InvariantBroken(f"{client_request.name} is broken off for nothing: {effect.detail}", invariant=22)
        self._watch.saw("a request was broken off")
        self._end_all(client_request)

    def _other_weights(self, client_request: SimulatedRequest, router: SimulatedRouter) -> None:
        """59: it has begun, and whoever is here computes with others."""
        if client_request.weights is None or router.fit.serves(client_request.weights) or not router.fit.anybody:
            raise InvariantBroken(f"{client_request.name} is broken off, and could go on with its weights", invariant=59)
        self._watch.saw("an answer ended, as other weights are served")
        self._end_all(client_request)

    def router_died(self, router: int) -> None:
        for request, begun in self._begun.items():
            client_request = self._watch.client_requests[request]
            if begun.router == router and not begun.broken and not client_request.is_answered:
                begun.broken = True
                self._watch.saw("a stream broke with its router")
                self._end_all(client_request)

    def _end_all(self, client_request: SimulatedRequest) -> None:
        client_request.ended = [reason or FinishReason.ERROR for reason in client_request.ended]
        self._answered(client_request)

    def _answered(self, client_request: SimulatedRequest) -> None:
        if client_request.is_answered:
            self.open -= 1

    def _disturbances(self, client_request: SimulatedRequest) -> int:
        """Since its request came, or so shortly before that they may still show."""
        return self._rough + self._watch.disturbances_since(self._begun[client_request.client.id].at - AFTERMATH_SECONDS)

    def _losses(self, client_request: SimulatedRequest) -> int:
        return self._rough + self._watch.losses_since(self._begun[client_request.client.id].at - AFTERMATH_SECONDS)

    # Afterwards

    def heal(self) -> None:
        """Fresh requests, of which some are worth a hand-off: they must succeed."""
        size = self._scenario.block_size
        blocks = min(node.blocks for node in self._cluster.nodes)
        for number in range(FRESH):
            length = min(1 + number * size, max(1, (blocks - 1) * size))
            prompt = [(7 * number + place) % VOCAB for place in range(length)]
            outputs = min(1 + number, blocks * size - length + 1)
            client = Client(id=f"fresh{number}", at=self._timeline.now, prompt=prompt, max_tokens=outputs, seed=number)
            client_request = SimulatedRequest(client, weights_known=self._watch.weights_known)
            self._watch.add(client_request)
            self._fresh.append(client_request)
            self._ask(client_request, number % len(self._routers))

    def check_fresh(self) -> None:
        for client_request in self._fresh:
            if not all(reason in COMPLETE for reason in client_request.ended):
                raise InvariantBroken(
                    f"{client_request.name}: {client_request.refused or client_request.ended} after everything was healed",
                    invariant=35,
                )

    def at_rest(self) -> None:
        """22: everyone was answered; without faults, everything that fits succeeded."""
        for client_request in self._watch.all_trips:
            if client_request.submitted and not client_request.is_answered:
                raise InvariantBroken(f"{client_request.name} was never answered", invariant=22)
            calm = self._quiet and client_request.client.timeout is None and client_request.refused is None
            if calm and not all(reason in COMPLETE for reason in client_request.ended):
                raise InvariantBroken(f"{client_request.name} did not succeed", invariant=22)
        patient = min(self._cluster.lease_seconds, self._cluster.handing_seconds_max) >= 10.0 and not self._scenario.bound
        if self._quiet and patient and all(client_request.client.timeout is None for client_request in self._watch.all_trips):
            self._watch.check_handoffs()

    def unanswered(self) -> list[str]:
        return [
            client_request.name
            for client_request in self._watch.all_trips
            if client_request.submitted and not client_request.is_answered
        ]

    def _note(self, text: str) -> None:
        self._timeline.note("clients", text)
