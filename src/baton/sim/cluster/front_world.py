"""`baton serve` on one timeline: clients, the front of one engine (front.py), one node. Chaos, heal, fresh requests, rest."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import cast

from baton.core.delivery.front import ClientWithdrawal
from baton.core.events import Pause
from baton.errors import InvariantBroken
from baton.protocol.ids import RequestId
from baton.protocol.request import FinishReason
from baton.sim.clock import Clock
from baton.sim.cluster.clients import ClusterClients, RequestBegun
from baton.sim.cluster.front import FrontProcess
from baton.sim.cluster.node import ClusterNode
from baton.sim.cluster.router import SimulatedRouter
from baton.sim.cluster.watch import ClusterWatch
from baton.sim.cluster.wires import Wire, Wires
from baton.sim.engine import POOLS_EACH, SimulatedEngine
from baton.sim.generate import PromptTree, stream
from baton.sim.scenario import VOCAB, Client, Cluster, ClusterFault, NodeSpec, Scenario
from baton.sim.simulated_request import SimulatedRequest
from baton.sim.timeline import Timeline
from baton.sim.world import World

SECONDS_MAX = 60.0
"""After the last fault every request is answered within this time."""


class FrontClients(ClusterClients):
    """Every second client that goes closes its connection; the others ask for an abort, and get their end."""

    def __init__(self, scenario: Scenario, timeline: Timeline, watch: ClusterWatch, front: FrontProcess) -> None:
        super().__init__(scenario, timeline, watch, cast("list[SimulatedRouter]", [front]))
        self._front = front

    def begin(self) -> None:
        for client_request in self._watch.all_trips:
            self._timeline.at(client_request.client.at, self._arrive, client_request)
            if client_request.client.abort_at is not None:
                self._timeline.at(client_request.client.abort_at, self._leave_at, client_request)
            if client_request.client.stop_last_at is not None:
                self._timeline.at(client_request.client.stop_last_at, self._stop_last, client_request)

    def _arrive(self, client_request: SimulatedRequest) -> None:
        self.to_come -= 1
        self._ask(client_request, 0)

    def _ask(self, client_request: SimulatedRequest, router: int) -> None:
        client_request.submitted = True
        self.open += 1
        self._begun[client_request.client.id] = RequestBegun(0, self._timeline.now)
        self._watch.arrives(client_request.client.id, 0)
        self._front.arrives(client_request.request)

    def leave(self, request: str) -> None:
        client_request = self._watch.client_requests[request]
        if not client_request.submitted or client_request.is_answered or client_request.aborted:
            return
        client_request.aborted = True
        self._watch.saw("a client left" if self._front.machine.away is None else "a client left without an engine")
        if client_request.client.seed % 2:
            self._front.withdraw(ClientWithdrawal(RequestId(request)))
            return
        client_request.ended = [reason or FinishReason.ABORT for reason in client_request.ended]
        self._answered(client_request)
        self._front.leaves(RequestId(request))

    def _stop_last(self, client_request: SimulatedRequest) -> None:
        if client_request.submitted and not client_request.is_answered and client_request.ended[-1] is None:
            self._watch.saw("one sequence was withdrawn")
            self._stopped[client_request.client.id] = None
            self._front.withdraw(
                ClientWithdrawal(RequestId(client_request.client.id), client_request.client.n - 1, FinishReason.STOP)
            )

    def failed(self, client_request: SimulatedRequest) -> None:
        if client_request.weights is None and not any(client_request.ended):
            client_request.refused = "no engine"
            self._answered(client_request)
        else:
            self._end_all(client_request)


class FrontWorld(World):
    def __init__(self, scenario: Scenario, note: Callable[[float, str, str], None] | None = None) -> None:
        assert scenario.cluster is not None
        super().__init__(scenario, note)
        self.watch = ClusterWatch(scenario)
        self.sometimes = self.watch.sometimes
        self.front = FrontProcess(self.timeline, self.watch)
        self.clients = FrontClients(scenario, self.timeline, self.watch, self.front)
        self.front.hearers = self.clients
        self._wires = Wires(self.timeline, scenario.seed, scenario.cluster.delay, scenario.cluster.jitter)
        self._path = self._wires.path(0, 0)
        self.remote = False
        self.node = ClusterNode(
            0, scenario.cluster.nodes[0], scenario, self.timeline, self.watch, self._dial, self._engine, 1, "engine", 0
        )
        self._faults = scenario.cluster.faults
        self._engines: list[SimulatedEngine] = []

    def _dial(self, node: ClusterNode, router: int) -> Wire | None:
        return self._wires.open(node, self.front, self._path)

    def _engine(self, node: ClusterNode) -> SimulatedEngine:
        clock = Clock(self.timeline, self.scenario.seed, 0, skewed=False)
        engine = node.make_engine(clock, {}, self, node.lives * POOLS_EACH)
        self._engines.append(engine)
        return engine

    def find(self, address: str) -> None:
        """No other instance is there."""

    @property
    def tokens(self) -> int:
        return self.clients.tokens

    @property
    def events(self) -> int:
        engines = sum(engine.results + engine.plans.rows for engine in self._engines)
        return self.timeline.heap_events + engines + self.clients.deliveries

    def _play(self) -> None:
        self.node.start()
        self._must(lambda: self.front.machine.identity is not None, "ready")
        self.clients.begin()
        for fault in self._faults:
            self.timeline.at(self.timeline.now + (fault.at or 0.0), self._strike, fault)
        end = self.timeline.now + max((fault.at or 0.0) + fault.seconds for fault in [*self._faults, ClusterFault("kill")])
        self._must(lambda: self.timeline.now >= end and not self.clients.open and not self.clients.to_come, "answered")
        self.node.heal(self.node.weights)
        self._must(lambda: self.node.is_ready and self.front.machine.away is None, "ready again")
        self.clients.heal()
        self._must(lambda: not self.clients.open, "answered, though fresh")
        self.clients.check_fresh()
        if self.node.engine is not None:
            self.node.engine.dispatch(Pause())
        self._must(lambda: self.node.engine is not None and self.node.engine.is_drained, "at rest")
        self.clients.at_rest()
        self.node.at_rest()
        if self.front.machine.ledgers:
            raise InvariantBroken(f"the front at rest: {list(self.front.machine.ledgers)}", invariant=9)

    def _must(self, condition: Callable[[], bool], what: str) -> None:
        if not self.timeline.run_until(condition, self.timeline.now + SECONDS_MAX, self.front.machine.check):
            raise InvariantBroken(f"not {what} within {SECONDS_MAX:.0f} s: {self.clients.unanswered()[:5]}", invariant=35)

    def _strike(self, fault: ClusterFault) -> None:
        self.timeline.note("world", f"{fault.kind} {fault.seconds:.2f}")
        if fault.kind == "freeze":
            self.node.freeze(fault.seconds)
            return
        if fault.kind == "reload":
            self.node.weights = fault.weights
        if self.node.engine is not None and self.node.engine.frozen:
            self.watch.saw("a frozen engine was killed")
        self.node.kill(fault.seconds)


def generate_front(seed: int) -> Scenario:
    """One engine, a few clients with tiny prompts, one to four faults."""
    rng = stream(seed, "front")
    size = rng.choice((1, 2, 4, 8))
    tree = PromptTree(stream(seed, "front prompts"), size)
    clients = [_client(number, tree, rng) for number in range(rng.randint(2, 8))]
    worst = max(-(-(len(client.prompt) + client.max_tokens) // size) * client.n for client in clients)
    node = NodeSpec("mixed", worst * rng.choice((1, 2, 4)) + 2, rng.choice((3, 4, 8)), 256)
    scenario = Scenario(seed, 0, size, 0, 0, clients, steps_in_flight=rng.choice((1, 2, 3)), restart_seconds=0.05)
    faults = sorted(_fault(rng) for _ in range(rng.randint(1, 4))) if seed % 8 else []
    scenario.cluster = Cluster([node], front=True, faults=[fault for _, _, fault in faults])
    return scenario


def _client(number: int, tree: PromptTree, rng: Random) -> Client:
    most = rng.randint(1, 30)
    client = Client(f"r{number}", rng.uniform(0.0, 0.3), tree.prompt(rng), most, seed=rng.randrange(1000))
    client.n = rng.choice((1, 1, 2, 3))
    client.stop = [rng.randrange(VOCAB)] if rng.random() < 0.2 else []
    client.timeout = rng.uniform(0.05, 2.0) if rng.random() < 0.15 else None
    client.logprobs, client.prompt_logprobs = rng.choice((None, None, 0, 2)), rng.choice((None, None, None, 0))
    client.abort_at = rng.uniform(0.0, 1.5) if rng.random() < 0.4 else None
    client.stop_last_at = rng.uniform(0.0, 1.0) if rng.random() < 0.3 else None
    return client


def _fault(rng: Random) -> tuple[float, int, ClusterFault]:
    at, kind = rng.uniform(0.0, 0.8), rng.choice(("kill", "kill", "reload", "freeze"))
    seconds = rng.choice((0.0, 0.1, 0.5))
    weights = rng.choice((0, 1, 1))
    return at, rng.randrange(1 << 30), ClusterFault(kind, at=at, seconds=seconds, weights=weights)  # type: ignore[arg-type]
