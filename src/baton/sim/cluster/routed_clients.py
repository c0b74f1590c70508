"""Clients of a cluster: each has a stream with one router, and the stream breaks when the router dies."""

from __future__ import annotations

from baton.core.cluster.coordinator import NO_INSTANCE
from baton.core.cluster.events import FailRequest, RejectRequest, SubmitRequest, WithdrawRequest
from baton.errors import InvariantBroken
from baton.protocol.ids import RequestId
from baton.protocol.output import OTHER_WEIGHTS, Emit, Ended
from baton.protocol.request import FinishReason
from baton.sim.clients import Clients
from baton.sim.cluster.router import SimulatedRouter
from baton.sim.cluster.watch import ClusterWatch
from baton.sim.excuses import Cost
from baton.sim.scenario import VOCAB, Client, Scenario
from baton.sim.simulated_request import SimulatedRequest
from baton.sim.timeline import Timeline

AFTERMATH_SECONDS = 10.0
FRESH_SECONDS = 60.0
"""Least bound on the time in the queue for fresh requests, which all come at once: a shorter one may end them."""
TIMEOUT_MARGIN = 1.1
"""Difference of clocks and delays that a timeout may show: clocks differ by up to a hundredth."""


class RequestBegun:
    """A client's record of its submitted request."""

    __slots__ = ("at", "broken", "last_at", "router", "silences")

    def __init__(self, router: int, at: float) -> None:
        self.router = router
        self.at = at
        self.last_at = at
        "Time of the last token."
        self.silences = 0
        "Number of gaps as long as a router may wait for a token."
        self.broken = False
        "Whether the router died: nothing more arrives, and no check fails for that."

    def record_arrival(self, now: float, patience: float) -> None:
        """Record a token, or an end."""
        self.silences += int((now - self.last_at) / patience)
        self.last_at = now


class ClusterClients(Clients):
    """Clients of a cluster, or of the front of one engine."""

    def __init__(self, scenario: Scenario, timeline: Timeline, watch: ClusterWatch) -> None:
        super().__init__(scenario, timeline, watch)
        assert scenario.cluster is not None
        self._cluster = cluster = scenario.cluster
        self._of_cluster = watch
        self._begun: dict[str, RequestBegun] = {}
        self._patience = 0.97 * min(cluster.silence_seconds_max, cluster.prefill_seconds_max)
        "Difference that clocks may have."
        patient = min(cluster.silence_seconds_max, cluster.prefill_seconds_max, cluster.queue_seconds_max) >= 300.0
        self._quiet = self._quiet and patient

    def _leave(self, request: SimulatedRequest) -> None:
        self.leave(request.client.id)

    def leave(self, request: str) -> None:
        """Cancel the request: its client has disconnected."""
        raise NotImplementedError

    def _arrives(self, request: SimulatedRequest, router: int) -> None:
        request.submitted = True
        self.open += 1
        self._begun[request.client.id] = RequestBegun(router, self._timeline.now)
        self._of_cluster.arrives(request.client.id, router)

    # Answers

    def delivered(self, emit: Emit) -> None:
        self._of_cluster.delivered(emit)
        super().delivered(emit)

    def _gets(self, request: SimulatedRequest, index: int, token: int) -> None:
        self._begun[request.client.id].record_arrival(self._timeline.now, self._patience)

    def _timed_out(self, request: SimulatedRequest, index: int) -> None:
        timeout, waited = request.client.timeout, self._timeline.now - self._begun[request.client.id].at
        if timeout is None or waited < timeout / TIMEOUT_MARGIN:
            raise InvariantBroken(f"{request.name} times out after {waited:.3f} s, not {timeout}", invariant=22)
        self._watch.saw("a request timed out")

    def _failed(self, request: SimulatedRequest, index: int, ended: Ended) -> None:
        outputs, client = len(request.delivered[index]), request.client
        if client.nan_at == outputs and ended.error == "row_failed":
            self._watch.saw("one row failed, alone")
        elif ended.error == "poison" and self._excuses("poison", request) > (client.poison_at is None):
            self._watch.saw("a poisonous request was given up")
        else:
            raise InvariantBroken(f"{ended.request}.{index} fails for nothing: {ended.error} {ended.detail}", invariant=22)

    def _excuses(self, cost: Cost, request: SimulatedRequest) -> int:
        """Number of faults since the request came, or so shortly before that they may still show."""
        return self._watch.faults.excuses(cost, self._begun[request.client.id].at - AFTERMATH_SECONDS)

    # Afterwards

    def _may_be_refused(self, request: SimulatedRequest) -> bool:
        """Whether a refusal is allowed. A short bound on the time in the queue holds for fresh requests too; 62 shows that no
        instance was idle meanwhile."""
        return request.refused == "queued_too_long" and self._cluster.queue_seconds_max < FRESH_SECONDS

    def _fresh_client(self, number: int) -> Client:
        """A fresh client. Some have prompts that are worth a hand-off, where impatient routers let instances compute them."""
        size, blocks = self._scenario.block_size, min(instance.blocks for instance in self._cluster.instances)
        length = max(1, min(1 + number * size, (blocks - 1) * size, int(self._patience / 2 / self._seconds_per_token)))
        prompt = [(7 * number + place) % VOCAB for place in range(length)]
        outputs = min(1 + number, blocks * size - length + 1)
        return Client(f"fresh{len(self._fresh)}", self._timeline.now, prompt, outputs, seed=number)

    @property
    def _seconds_per_token(self) -> float:
        """The longest time that an instance without faults needs for a token of a prompt, in a step of its own."""
        slowest = max(instance.speed for instance in self._cluster.instances)
        return (self._scenario.step_seconds + self._scenario.token_seconds) * (1.0 + self._scenario.noise) * slowest


class RoutedClients(ClusterClients):
    def __init__(self, scenario: Scenario, timeline: Timeline, watch: ClusterWatch, routers: list[SimulatedRouter]) -> None:
        super().__init__(scenario, timeline, watch)
        self._routers = routers

    # Actions

    def _submit(self, entry: tuple[SimulatedRequest, int]) -> None:
        request, number = entry
        self.to_come -= 1
        router = number % len(self._routers)
        for other in (*range(router, len(self._routers)), *range(router)):  # a client that finds no router tries the next
            if self._routers[other].machine is not None:
                self._ask(request, other)
                return
        self._watch.saw("no router was there")
        request.refused = "unserved"

    def _ask(self, request: SimulatedRequest, router: int) -> None:
        client = request.client
        self._note(f"{client.id} asks router {router}: {len(client.prompt)} + {client.max_tokens} x {client.n}")
        self._arrives(request, router)
        if self._routers[router].machine is not None:
            self._routers[router].submit(SubmitRequest(request.request))
        elif not self._begun[client.id].broken:
            self.router_died(router)  # withdrawn as soon as it arrives

    def leave(self, request: str) -> None:
        asked = self._watch.requests[request]
        if asked.submitted and not asked.is_answered and not asked.aborted:
            asked.aborted = True
            self._watch.saw("a client left")
            self._withdraw(asked, None, FinishReason.ABORT)

    def _withdraw(self, request: SimulatedRequest, index: int | None, reason: FinishReason) -> None:
        router = self._routers[self._begun[request.client.id].router]
        if reason is FinishReason.STOP and request.client.id in self._of_cluster.replayed:
            self._watch.saw("a stop string after a replay")
        if router.machine is not None:
            router.submit(WithdrawRequest(RequestId(request.client.id), index, reason))

    # Answers

    def turned_away(self, effect: RejectRequest) -> None:
        request = self._watch.requests[effect.request]
        if any(request.delivered) or any(request.ended) or request.refused:
            raise InvariantBroken(f"{effect.request} is turned away after it was answered", invariant=22)
        self._note(f"{effect.request} is turned away: {effect.refused.reason}")
        self._watch.saw(f"turned away: {effect.refused.reason}")
        request.refused = effect.refused.reason
        self._earned(request, effect.refused.reason)
        self._answered(request)

    def _earned(self, request: SimulatedRequest, reason: str) -> None:
        """22: a request is rejected only for a reason that is true."""
        cluster, client, size = self._cluster, request.client, self._scenario.block_size
        needed = -(-(len(client.prompt) + client.max_tokens - 1) // size)
        router, waited = self._routers[self._begun[client.id].router], self._timeline.now - self._begun[client.id].at
        match reason:
            case "never_fits":
                missed = self._timeline.now - router.seen_with(needed)
                ok = missed > router.config.no_instance_seconds * 0.97  # clocks differ
            case "queue_full" | "queue_tokens_full" | "never_queued":
                ok = cluster.router_queue_max < 1024 or self._excuses("delay", request) > 0
            case "queued_too_long":
                ok = waited > cluster.queue_seconds_max * 0.97  # clocks differ
            case _:
                ok = self._excuses("refusal", request) > 0
        if not ok:
            raise InvariantBroken(f"{request.name} is turned away for nothing: {reason}", invariant=22)

    def broken_off(self, effect: FailRequest) -> None:
        """Check a failed request. 22: requests fail only after too many lost instances, or after a long time without one."""
        request, begun = self._watch.requests[effect.request], self._begun[effect.request]
        self._note(f"{effect.request} is broken off: {effect.detail}")
        if effect.detail == OTHER_WEIGHTS:
            self._other_weights(request, self._routers[begun.router])
            return
        if effect.detail.startswith(NO_INSTANCE) and not any(request.delivered):  # a rejection, after a sequence was withdrawn
            words = {"the pool has": "never_fits", "the queue holds": "queue_full", "instance with room": "queued_too_long"}
            reason = next((reason for text, reason in words.items() if text in effect.detail), "worker_gone")
            self._earned(request, reason)
            self._watch.saw("a request was broken off")
            self._end_all(request)
            return
        begun.record_arrival(self._timeline.now, self._patience)
        waited, lost = self._timeline.now - begun.at, self._excuses("move", request) + begun.silences
        unserved = waited > self._cluster.queue_seconds_max * 0.97 or (waited > 9.0 and self._excuses("refusal", request) > 0)
        if effect.error != "worker_gone" or not (lost > self._cluster.migrations_max or unserved):
            raise InvariantBroken(f"{request.name} is broken off for nothing: {effect.detail}", invariant=22)
        self._watch.saw("a request was broken off")
        self._end_all(request)

    def _other_weights(self, request: SimulatedRequest, router: SimulatedRouter) -> None:
        """59: an answer that has begun ends with this error only if all connected instances have other weights."""
        if request.weights is None or router.fit.serves(request.weights) or not router.fit.has_instances:
            raise InvariantBroken(f"{request.name} is broken off, and could go on with its weights", invariant=59)
        self._watch.saw("an answer ended, as other weights are served")
        self._end_all(request)

    def router_died(self, router: int) -> None:
        for id_, begun in self._begun.items():
            if begun.router == router and not begun.broken and not self._watch.requests[id_].is_answered:
                begun.broken = True
                self._watch.saw("a stream broke with its router")
                self._end_all(self._watch.requests[id_])

    def at_rest(self) -> None:
        super().at_rest()
        patient = min(self._cluster.lease_seconds, self._cluster.handing_seconds_max) >= 10.0 and not self._scenario.bound
        if self._quiet and patient and all(request.client.timeout is None for request in self._watch.all_requests):
            self._of_cluster.check_handoffs()
