"""Worlds whose clients talk to a router or to a front: a cluster, and `baton serve`.

Heartbeats never end, so a run ends when all requests are answered and every process is at rest, within the bounds of
docs/internals/reliability.md; not when the heap is empty.
"""

from __future__ import annotations

from baton.config import RouterConfig
from baton.core.instance import Instance
from baton.sim.cache import CacheService, SimulatedObject
from baton.sim.clock import Clock
from baton.sim.cluster.digests import check_known, is_known
from baton.sim.cluster.faults import Faults
from baton.sim.cluster.front import FrontClients, FrontProcess
from baton.sim.cluster.isolation import Isolation
from baton.sim.cluster.links import SimulatedLinks
from baton.sim.cluster.reservation_watch import ReservationWatch
from baton.sim.cluster.rest import check_front_rest
from baton.sim.cluster.routed_clients import ClusterClients, RoutedClients
from baton.sim.cluster.router import SimulatedRouter
from baton.sim.cluster.watch import ClusterWatch
from baton.sim.cluster.wires import Wire, Wires
from baton.sim.engine import NOTICE_SECONDS, POOLS_EACH, SimulatedEngine, config_of
from baton.sim.instance import SimulatedInstance
from baton.sim.plans import PlanWatch
from baton.sim.scenario import ClusterFault, Scenario
from baton.sim.world import Tracer, World

CHAOS_SECONDS_MAX = 60.0
"""Seconds after the last fault and the last arrival at which all faults are healed, whatever is still open."""
ANSWER_SECONDS_MAX = 30.0
"""Seconds after healing within which every request is answered; longer where there is much to compute."""
FRESH_SECONDS_MAX = 10.0
DIGEST_SECONDS_MAX = 30.0
"""Seconds at rest within which routers know the instances' cached keys: heartbeats carry a few keys each."""


class LinkedWorld(World):
    """The world of instances with routers or a front."""

    watch_type: type[ClusterWatch] = ClusterWatch
    plans_type: type[PlanWatch] = PlanWatch
    clients: ClusterClients

    def __init__(self, scenario: Scenario, tracer: Tracer | None = None) -> None:
        super().__init__(scenario, tracer)
        assert scenario.cluster is not None
        cluster = self.cluster = scenario.cluster
        self.watch: ClusterWatch = self.watch_type(scenario, self.timeline)
        self.wires = Wires(self.timeline, scenario.seed, cluster.delay, cluster.jitter)
        self.remote = cluster.remote
        self._services: dict[str, CacheService] = {}
        self._storage: dict[bytes, SimulatedObject] = {}
        self._plans: dict[int, PlanWatch] = {}
        "Watch of the plans of each instance's present or last life, by number."

    def _instance(self, number: int, kind: int, name: str, routers: int) -> SimulatedInstance:
        spec = self.cluster.instances[kind]
        instance = SimulatedInstance(number, spec, self.timeline, self.watch, self._engine, name, kind)
        instance.links = SimulatedLinks(instance, self.scenario, self.timeline, self.watch, self._dial, routers)
        return instance

    def _dial(self, links: SimulatedLinks, router: int) -> Wire | None:
        """Open a session. None: the other end does not accept, or the path is stalled."""
        raise NotImplementedError

    def _clock(self, number: int) -> Clock:
        return Clock(self.timeline, self.scenario.seed, number, skewed=self.cluster.skew)

    def _engine(self, instance: SimulatedInstance) -> SimulatedEngine:
        """Start a new life of the instance."""
        scenario, watch = self.scenario.of_instance(instance.kind), self.watch
        machine = Instance(config_of(scenario, instance.role))
        plans = self._plans[instance.number] = self.plans_type(scenario, machine.view, watch)
        waiting_max = machine.config.tiers.reservations_waiting_max
        reservations = ReservationWatch(machine.view, waiting_max, watch.saw, by_priority=scenario.order == "priority")
        engine = SimulatedEngine(
            instance.name, instance.role, scenario, self.timeline, self._clock(instance.number), machine, instance,
            reservations, plans, plans, watch.contents, lambda: instance.weights, self._storage, self,
            (instance.number * 1_000 + instance.lives) * POOLS_EACH,
        )  # fmt: skip
        plans.weights = lambda: engine.process.worker.weights
        self._engines.append(engine)
        if engine.cache is not None:
            self._services[instance.address] = engine.cache
        return engine

    def find(self, address: str) -> CacheService | None:
        return self._services.get(address)


class ClusterWorld(LinkedWorld):
    clients_type: type[RoutedClients] = RoutedClients

    def __init__(self, scenario: Scenario, tracer: Tracer | None = None) -> None:
        super().__init__(scenario, tracer)
        cluster = self.cluster
        pairs = any(instance.role == "prefill" for instance in cluster.instances)
        self.routers = [
            SimulatedRouter(number, self._router_config(), self.timeline, self._clock(100 + number), self.watch, pairs=pairs)
            for number in range(cluster.routers)
        ]
        self.instances = [
            self._instance(number, number, f"{spec.role[0]}{number}", cluster.routers)
            for number, spec in enumerate(cluster.instances)
        ]
        self.strays: list[SimulatedInstance] = []
        for fault in cluster.faults:
            if fault.kind == "stray":
                self.strays.append(self._stray(fault))
        self.clients: RoutedClients = self.clients_type(scenario, self.timeline, self.watch, self.routers)
        self.faults = Faults(
            cluster, self.timeline, self.watch, self.wires, self.instances, self.strays, self.routers, self.clients
        )
        for router in self.routers:
            router.clients = self.clients
        self.watch.at_stage = self.faults.at_stage

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
            handoff_room_seconds=cluster.handoff_room_seconds,
            handoff_retry_interval=cluster.handoff_retry_interval,
            prefix_keys_max=cluster.prefix_keys_max,
        )

    def _stray(self, fault: ClusterFault) -> SimulatedInstance:
        """The stray of a fault, not started yet."""
        number, kind = len(self.instances) + len(self.strays), fault.target % len(self.instances)
        name = self.instances[kind].name if fault.alias else f"stray{number}"
        stray = self._instance(number, kind, name, self.cluster.routers)
        stray.weights = fault.weights
        return stray

    def _dial(self, links: SimulatedLinks, router: int) -> Wire | None:
        process, path = self.routers[router], self.wires.path(links.instance.number, router)
        if not process.accepts() or any(until > self.timeline.now for until in path.stalled_until.values()):
            return None
        wire = self.wires.open(links, process, path)
        process.dialled(wire)
        return wire

    def _chaos(self) -> None:
        for router in self.routers:
            router.start()
        for instance in self.instances:
            instance.start()
        self.clients.begin()
        self.faults.begin()
        last = max([self.faults.last, *(client.at for client in self.scenario.clients)])
        self._run(lambda: self.clients.open == 0 and self.timeline.now >= last and not self.clients.to_come,
                  last + CHAOS_SECONDS_MAX)  # fmt: skip

    def _heal(self) -> None:
        self.faults.heal()
        scenario = self.scenario
        work = sum(client.n * (len(client.prompt) + client.max_tokens) for client in scenario.clients)
        slowest = max(instance.speed for instance in self.cluster.instances)
        bound = max(ANSWER_SECONDS_MAX, 4 * work * (scenario.step_seconds + scenario.token_seconds) * slowest)
        bound += self.faults.longest
        self._must_be_whole(bound)
        self.clients.heal()
        self._must(lambda: self.clients.open == 0, FRESH_SECONDS_MAX, "answered, though fresh")

    def _must_be_whole(self, bound: float) -> None:
        """35: within `bound` all requests are answered and all instances have joined. Instances that still isolate poison have
        the time of their restarts in addition."""
        whole = lambda: self.clients.open == 0 and self._all_joined()  # noqa: E731
        isolation = Isolation(self.scenario, [(instance, self._plans[instance.number]) for instance in self.instances])
        healed_at, seconds = self.timeline.now, bound
        while not self._run(whole, healed_at + seconds):
            if bound + isolation.seconds <= seconds:
                raise self._late(seconds, "answered or joined after healing")
            seconds = bound + isolation.seconds

    def _drained(self) -> bool:
        return super()._drained() and all(router.machine is not None and router.machine.idle for router in self.routers)

    def _all_joined(self) -> bool:
        whole = all(router.sessions == len(self.instances) and router.is_whole for router in self.routers)
        ready = all(instance.is_working if self._impatient else instance.is_ready for instance in self.instances)
        return whole and self.wires.flow and ready

    @property
    def _impatient(self) -> bool:
        """Whether routers are configured to give up a request before an instance has replaced a hung worker. Then fresh
        requests wait for the replacement: healing replaces no worker whose hang its engine has not noticed."""
        patience = min(self.cluster.silence_seconds_max, self.cluster.prefill_seconds_max)
        return patience < self.scenario.step_seconds_max + NOTICE_SECONDS + self.scenario.restart_seconds

    def _rest(self) -> None:
        self._check_digests()
        super()._rest()
        for router in self.routers:
            router.at_rest()

    def _check_digests(self) -> None:
        """70: soon after the last request every router knows exactly what each instance has."""
        if self.scenario.digests != "true":
            return
        digests = [(each.name, each.engine.instance.board.digest) for each in self.instances if each.engine is not None]
        pairs = [(router.machine, name, digest) for router in self.routers if router.machine for name, digest in digests]
        known = lambda: all(is_known(*pair) for pair in pairs if pair[2] is not None)  # type: ignore[arg-type]  # noqa: E731
        if not self._run(known, self.timeline.now + DIGEST_SECONDS_MAX):
            for router, name, digest in pairs:
                if digest is not None:
                    check_known(router, name, digest)

    def _full_check(self) -> None:
        for instance in (*self.instances, *self.strays):
            instance.full_check()
        for router in self.routers:
            if router.machine is not None:
                router.machine.check()


class FrontWorld(LinkedWorld):
    def __init__(self, scenario: Scenario, tracer: Tracer | None = None) -> None:
        super().__init__(scenario, tracer)
        self.front = FrontProcess(scenario, self.timeline, self.watch)
        self.instances = [self._instance(0, 0, "engine", 1)]
        self.clients: FrontClients = FrontClients(scenario, self.timeline, self.watch, self.front, self.instances[0])
        self.front.clients = self.clients
        self.faults = Faults(self.cluster, self.timeline, self.watch, self.wires, self.instances, [], [], self.clients)

    def _dial(self, links: SimulatedLinks, router: int) -> Wire | None:
        return self.wires.open(links, self.front, self.wires.path(0, 0))

    def _chaos(self) -> None:
        (instance,), machine = self.instances, self.front.machine
        instance.start()
        self._must(lambda: machine.identity is not None, CHAOS_SECONDS_MAX, "ready")
        self.clients.begin()
        self.faults.begin()
        end = self.timeline.now + self.faults.end
        self._must(lambda: self.timeline.now >= end and not self.clients.open and not self.clients.to_come,
                   CHAOS_SECONDS_MAX, "answered")  # fmt: skip

    def _heal(self) -> None:
        self.faults.heal()
        ready = lambda: self.instances[0].is_ready and self.front.machine.away is None  # noqa: E731
        self._must(ready, ANSWER_SECONDS_MAX, "ready again")
        self.clients.heal()
        self._must(lambda: not self.clients.open, FRESH_SECONDS_MAX, "answered, though fresh")

    def _rest(self) -> None:
        super()._rest()
        check_front_rest(self.front.machine)
        self.clients.close()
        check_front_rest(self.front.machine)

    def _after_each(self) -> None:
        super()._after_each()
        self.front.machine.check()
