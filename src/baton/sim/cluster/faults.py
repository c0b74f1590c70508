"""Faults of a cluster: each strikes at a time, or when the n-th request reaches a stage of its hand-off."""

from __future__ import annotations

from baton.sim.cluster.links import SimulatedLinks
from baton.sim.cluster.routed_clients import ClusterClients
from baton.sim.cluster.router import SimulatedRouter
from baton.sim.cluster.watch import ClusterWatch
from baton.sim.cluster.wires import Wires
from baton.sim.instance import SimulatedInstance
from baton.sim.scenario import Cluster, ClusterFault, Stage
from baton.sim.timeline import Timeline

LASTING = ("freeze", "stall", "stall_up", "stall_down", "worker_freeze", "worker_hang", "cache_hang")
"""Faults with a duration: a request may meet one again while it lasts, each time for as long as a hand-off may take."""
AGAIN_SECONDS = 0.5


class Faults:
    def __init__(
        self,
        cluster: Cluster,
        timeline: Timeline,
        watch: ClusterWatch,
        wires: Wires,
        instances: list[SimulatedInstance],
        strays: list[SimulatedInstance],
        routers: list[SimulatedRouter],
        clients: ClusterClients,
    ) -> None:
        self._timeline = timeline
        self._watch = watch
        self._wires = wires
        self._instances = instances
        self._strays = strays
        self._to_stray = list(zip((fault for fault in cluster.faults if fault.kind == "stray"), strays, strict=True))
        self._routers = routers
        self._clients = clients
        self._timed = [fault for fault in cluster.faults if fault.at is not None and fault.kind != "stray"]
        self._waiting: dict[Stage, list[ClusterFault]] = {}
        for fault in cluster.faults:
            if fault.stage is not None:
                self._waiting.setdefault(fault.stage, []).append(fault)
        self._reached: dict[Stage, int] = {}
        self._attempt_seconds = cluster.handing_seconds_max + AGAIN_SECONDS
        self._healed = False
        self.last = max((fault.at for fault in cluster.faults if fault.at is not None), default=0.0)
        "Time at which the last timed fault begins."
        self.end = max([0.5, *((fault.at or 0.0) + fault.seconds for fault in cluster.faults)])
        "Time at which the last fault ends."
        self.longest = max((fault.seconds for fault in cluster.faults if fault.kind != "stray"), default=0.0)

    def begin(self) -> None:
        """Schedule the timed faults, relative to now."""
        now = self._timeline.now
        for fault in self._timed:
            self._timeline.at(now + (fault.at or 0.0), self._at_time, fault)
        for entry in self._to_stray:
            self._timeline.at(now + (entry[0].at or 0.0), self._send_stray, entry)

    def heal(self) -> None:
        self._healed = True
        self._wires.heal()
        for stray in self._strays:
            stray.kill(None)
        for router in self._routers:
            router.heal()
        weights = self._most_common_weights()
        for instance in self._instances:
            instance.heal(weights)

    def _most_common_weights(self) -> int:
        loaded = [instance.loaded for instance in self._instances]
        return max(sorted(loaded), key=loaded.count)

    # Times and stages

    def at_stage(self, stage: Stage, request: str) -> None:
        self._watch.saw(f"a hand-off at {stage}")
        waiting = self._waiting.get(stage)
        if not waiting or self._healed:
            return
        reached = self._reached[stage] = self._reached.get(stage, 0) + 1
        for fault in waiting:
            if fault.nth == reached:  # after the present event
                self._timeline.at(self._timeline.now, self._at_party, (fault, request))

    def _at_time(self, fault: ClusterFault) -> None:
        if not self._healed:
            self._strike(
                fault, fault.target % (len(self._instances) + len(self._routers)), fault.router % max(1, len(self._routers))
            )

    def _at_party(self, entry: tuple[ClusterFault, str]) -> None:
        fault, request = entry
        parties = self._watch.parties.get(request)
        if parties is None or self._healed:
            return
        if fault.kind == "leave":
            self._timeline.note("world", f"{fault.stage}: {request} leaves")
            self._watch.saw(f"a client left at {fault.stage}")
            self._clients.leave(request)
            return
        party = {"prefill": parties.prefill, "decode": parties.decode, "router": len(self._instances) + parties.router}[
            fault.party
        ]
        if party is None and fault.party == "prefill":  # the instance is not chosen by a message yet: any prefill instance
            party = next((instance.number for instance in self._instances if instance.role == "prefill"), None)
        if fault.party != "router" and party is not None and party >= len(self._instances):
            return  # a stray has no other faults
        if party is not None:
            self._watch.saw(f"{fault.party} struck at {fault.stage}")
            self._strike(fault, party, parties.router)

    # Effects
    def _send_stray(self, entry: tuple[ClusterFault, SimulatedInstance]) -> None:
        """Start the stray instance. It counts as a fault only if a router accepts it (links.py)."""
        fault, stray = entry
        if not self._healed:
            self._timeline.note("world", f"{stray.name} strays in, with weights {fault.weights}")
            stray.start()
            self._timeline.at(self._timeline.now + fault.seconds, self._stray_leaves, stray)

    def _stray_leaves(self, stray: SimulatedInstance) -> None:
        stray.kill(None)

    def _strike(self, fault: ClusterFault, target: int, router: int) -> None:
        self._timeline.note("world", f"{fault.stage or ''} {fault.kind} {target} {fault.seconds:.2f}")
        for _ in range(1 + int(fault.seconds / self._attempt_seconds) if fault.kind in LASTING else 1):
            self._watch.happened(fault.kind)
        self._timeline.at(self._timeline.now + fault.seconds, self._after, fault.kind)
        if target >= len(self._instances):
            process = self._routers[target - len(self._instances)]
            if fault.kind == "kill":
                process.kill(fault.seconds)
            elif fault.kind == "freeze":
                process.freeze(fault.seconds)
            elif fault.kind in ("cut", "stall", "stall_up", "stall_down"):
                for instance in self._instances:
                    self._watch.happened(fault.kind)  # each of these sessions may be lost
                    self._strike_path(fault, instance, target - len(self._instances))
            return
        instance = self._instances[target]
        match fault.kind:
            case "reload":
                instance.weights = fault.weights
                instance.kill(fault.seconds)
            case "reload_worker":
                instance.weights = fault.weights
                self._strike_child(fault, instance)
            case "kill":
                instance.kill(fault.seconds)
                if all(other.engine is None for other in self._instances):
                    self._watch.saw("no instance was left")
            case "freeze":
                instance.freeze(fault.seconds)
            case "drain":
                instance.drain(fault.seconds)
            case "sleep":
                instance.sleep(fault.seconds)
            case "preempt" | "evict":
                instance.press(fault.kind, max(1, int(fault.seconds)))
            case "cut" | "stall" | "stall_up" | "stall_down":
                self._strike_path(fault, instance, router)
            case _:
                self._strike_child(fault, instance)

    def _after(self, kind: str) -> None:
        """Count the fault once more when it ends: clients may get its errors until a while later."""
        self._watch.happened(kind)

    def _strike_child(self, fault: ClusterFault, instance: SimulatedInstance) -> None:
        engine = instance.engine
        if engine is None:
            return
        match fault.kind:
            case "worker" | "reload_worker":
                engine.kill_worker()
            case "worker_hang":
                engine.hang_worker()
            case "worker_freeze":
                engine.freeze_worker(fault.seconds)
            case "cache" if engine.cache is not None:
                engine.cache.crash(kept=not fault.unseen)
            case "cache_hang" if engine.cache is not None:
                engine.cache.hang()

    def _strike_path(self, fault: ClusterFault, instance: SimulatedInstance, router: int) -> None:
        path = self._wires.path(instance.number, router)
        if fault.kind == "cut":
            self._watch.saw("a session was cut")
            assert isinstance(instance.links, SimulatedLinks)
            if (wire := instance.links.links[router].wire) is not None:
                wire.cut(fault.seconds, unseen=fault.unseen)
        elif fault.kind == "stall":
            self._watch.saw("a path stalled both ways")
            self._wires.stall(path, fault.seconds, "up", "down")
        else:
            self._watch.saw("a path stalled one way")
            self._wires.stall(path, fault.seconds, "up" if fault.kind == "stall_up" else "down")
