"""A cluster on one timeline: chaos, heal, fresh requests, drain, rest. The single node's is sim/world.py.

Beats never end, so a run is over when nobody is owed anything and every process is at rest, within the bounds of
docs/internals/reliability.md; not when the heap is empty.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.config import RouterConfig
from baton.core.events import Pause
from baton.errors import InvariantBroken
from baton.sim.cache import CacheService, StoredObject
from baton.sim.clock import Clock
from baton.sim.cluster.clients import ClusterClients
from baton.sim.cluster.faults import Faults
from baton.sim.cluster.node import ClusterNode
from baton.sim.cluster.plans import NodePlans
from baton.sim.cluster.router import SimulatedRouter
from baton.sim.cluster.watch import ClusterWatch
from baton.sim.cluster.wires import Wire, Wires
from baton.sim.engine import POOLS_EACH, SimulatedEngine
from baton.sim.scenario import ClusterFault, NodeSpec, Scenario
from baton.sim.world import World

CHAOS_SECONDS_MAX = 60.0
"""After the last fault and the last arrival, things are healed, whatever is still open."""
ANSWER_SECONDS_MAX = 30.0
"""After healing every request is answered within this time; more where there is much to compute."""
FRESH_SECONDS_MAX = 10.0
DRAIN_SECONDS_MAX = 60.0
FULL_CHECK_EVERY = 128


class ClusterWorld(World):
    watch_type: type[ClusterWatch] = ClusterWatch
    clients_type: type[ClusterClients] = ClusterClients
    plans_type: type[NodePlans] = NodePlans

    def __init__(self, scenario: Scenario, note: Callable[[float, str, str], None] | None = None) -> None:
        assert scenario.cluster is not None
        super().__init__(scenario, note)
        cluster = self.cluster = scenario.cluster
        self.watch = self.watch_type(scenario)
        self.sometimes = self.watch.sometimes
        self.wires = Wires(self.timeline, scenario.seed, cluster.delay, cluster.jitter)
        self.remote = cluster.remote
        pairs = any(node.role == "prefill" for node in cluster.nodes)
        self.routers = [
            SimulatedRouter(
                number, self._router_config(), scenario.seed, self.timeline, self._clock(100 + number), self.watch, pairs=pairs
            )
            for number in range(cluster.routers)
        ]
        self.nodes = [self._node(number, number, _name(spec, number)) for number, spec in enumerate(cluster.nodes)]
        self.strays: list[ClusterNode] = []
        for fault in cluster.faults:
            if fault.kind == "stray":
                self.strays.append(self._stray(fault))
        self._services: dict[str, CacheService] = {}
        self._engines: list[SimulatedEngine] = []
        self._storage: dict[bytes, StoredObject] = {}
        self.clients = self.clients_type(scenario, self.timeline, self.watch, self.routers)
        self.faults = Faults(
            cluster, self.timeline, self.watch, self.wires, self.nodes, self.strays, self.routers, self.clients
        )
        for router in self.routers:
            router.hearers = self.clients
        self.watch.at_stage = self.faults.at_stage
        self._next_full_check = FULL_CHECK_EVERY

    def _router_config(self) -> RouterConfig:
        cluster = self.cluster
        return RouterConfig(
            policy=cluster.policy,
            order=self.scenario.order,
            queue_requests_max=cluster.router_queue_max,
            waiting_prompts_max=cluster.waiting_prompts_max,
            handoff_tokens_min=cluster.handoff_tokens_min,
            migrations_max=cluster.migrations_max,
            lease_seconds=cluster.lease_seconds,
            handing_seconds_max=cluster.handing_seconds_max,
            silence_seconds_max=cluster.silence_seconds_max,
            prefill_seconds_max=cluster.prefill_seconds_max,
            queue_seconds_max=cluster.queue_seconds_max,
            overdrawn_max=cluster.overdrawn_max,
            handoff_retry_interval=cluster.handoff_retry_interval,
            prefix_keys_max=cluster.prefix_keys_max,
        )

    def _node(self, number: int, kind: int, name: str) -> ClusterNode:
        scenario, spec = self.scenario, self.cluster.nodes[kind]
        return ClusterNode(
            number, spec, scenario, self.timeline, self.watch, self._dial, self._engine, self.cluster.routers, name, kind
        )

    def _stray(self, fault: ClusterFault) -> ClusterNode:
        """It is started when its fault strikes."""
        number, kind = len(self.nodes) + len(self.strays), fault.target % len(self.nodes)
        node = self._node(number, kind, self.nodes[kind].name if fault.alias else f"stray{number}")
        node.weights = fault.weights
        return node

    def _clock(self, number: int) -> Clock:
        return Clock(self.timeline, self.scenario.seed, number, skewed=self.cluster.skew)

    def _engine(self, node: ClusterNode) -> SimulatedEngine:
        """A new life of a node."""
        pools = (node.number * 1_000 + node.lives) * POOLS_EACH
        engine = node.make_engine(self._clock(node.number), self._storage, self, pools, self.plans_type)
        self._engines.append(engine)
        if engine.cache is not None:
            self._services[node.address] = engine.cache
        return engine

    def find(self, address: str) -> CacheService | None:
        return self._services.get(address)

    def _dial(self, node: ClusterNode, router: int) -> Wire | None:
        """None: there is nobody, or nothing gets through."""
        process, path = self.routers[router], self.wires.path(node.number, router)
        if not process.accepts() or any(until > self.timeline.now for until in path.stalled_until.values()):
            return None
        wire = self.wires.open(node, process, path)
        process.dialled(wire)
        return wire

    # The run

    @property
    def tokens(self) -> int:
        return self.clients.tokens

    @property
    def events(self) -> int:
        engines = sum(engine.results + engine.plans.rows for engine in self._engines)
        return self.timeline.heap_events + engines + self.clients.deliveries

    def _play(self) -> None:
        for router in self.routers:
            router.start()
        for node in self.nodes:
            node.start()
        self.clients.begin()
        self.faults.begin()
        last = max([self.faults.last, *(client.at for client in self.scenario.clients)])
        self._run(lambda: self.clients.open == 0 and self.timeline.now >= last and not self.clients.to_come,
                  last + CHAOS_SECONDS_MAX)  # fmt: skip
        self._heal()
        self._drain()
        self._rest()

    def _rest(self) -> None:
        """9: nothing is held, and everyone was answered."""
        self.clients.at_rest()
        for router in self.routers:
            router.at_rest()
        for node in self.nodes:
            node.at_rest()

    def _heal(self) -> None:
        """35: everything works again, and so everyone is answered, and soon."""
        self.timeline.note("world", "healed")
        self.faults.heal()
        work = sum(client.n * (len(client.prompt) + client.max_tokens) for client in self.scenario.clients)
        serial = work * (self.scenario.step_seconds + self.scenario.token_seconds) * max(n.speed for n in self.cluster.nodes)
        bound = max(ANSWER_SECONDS_MAX, 4 * serial) + self.faults.longest
        self._must(lambda: self.clients.open == 0 and self._all_joined(), bound, "answered or joined after healing")
        self.clients.heal()
        self._must(lambda: self.clients.open == 0, FRESH_SECONDS_MAX, "answered, though fresh")
        self.clients.check_fresh()

    def _drain(self) -> None:
        self.timeline.note("world", "drain")
        for node in self.nodes:
            if node.engine is not None:
                node.engine.dispatch(Pause())
        self._must(self._drained, DRAIN_SECONDS_MAX, "at rest")

    def _drained(self) -> bool:
        return all(node.engine is not None and node.engine.is_drained for node in self.nodes) and all(
            router.machine is not None and router.machine.idle for router in self.routers
        )

    def _all_joined(self) -> bool:
        whole = all(router.sessions == len(self.nodes) and router.is_whole for router in self.routers)
        return whole and self.wires.flow and all(node.is_ready for node in self.nodes)

    def _must(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        if not self._run(condition, self.timeline.now + seconds):
            open_ = f": {', '.join(self.clients.unanswered()[:5])}" if self.clients.open else ""
            raise InvariantBroken(f"not {what} within {seconds:.0f} s{open_}", invariant=35)

    def _run(self, condition: Callable[[], bool], limit: float) -> bool:
        return self.timeline.run_until(condition, limit, self._after_each)

    def _after_each(self) -> None:
        if self.timeline.heap_events >= self._next_full_check:
            self._next_full_check = self.timeline.heap_events + FULL_CHECK_EVERY
            for node in (*self.nodes, *self.strays):
                node.full_check()
            for router in self.routers:
                if router.machine is not None:
                    router.machine.check()


def _name(spec: NodeSpec, number: int) -> str:
    return f"{spec.role[0]}{number}"
