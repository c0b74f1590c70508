"""A cluster whose speed is measured: the real core and the same virtual time, without proofs, digest, tags and oracles.

Every token is the same, so a scenario must not depend on what is sampled (stop ids, repetition). What happens and when is equal
to the rehearsal of the same scenario (tests/sim/test_measure.py). `bench/simulator.py` runs it.
"""

from __future__ import annotations

from typing import Any

from baton.protocol.output import Emit
from baton.protocol.step import StepPlan
from baton.sim.cluster.routed_clients import RoutedClients
from baton.sim.cluster.watch import ClusterWatch, KeptPrompt
from baton.sim.cluster.watch import WatchedEngine as SomeEngine
from baton.sim.engine import SimulatedEngine
from baton.sim.instance import SimulatedInstance
from baton.sim.linked_world import ClusterWorld
from baton.sim.plans import PlanWatch, untagged
from baton.sim.timeline import Timeline
from baton.sim.worker import SimulatedSlot, SimWorker

TOKEN = 7


class MeasuredTimeline(Timeline):
    """Timeline without a digest and without a bound of events."""

    events_max = 1 << 62

    def record(self, message: Any) -> None:
        pass


class MeasuredWorker(SimWorker):
    """Worker that counts positions and reads no block."""

    def _row(self, plan: StepPlan, slot: int, state: SimulatedSlot, count: int) -> tuple[int, ...]:
        state.computed += count
        if state.computed < len(state.tokens):
            return ()
        state.tokens.append(TOKEN)
        return (TOKEN,)


class MeasuredPlans(PlanWatch):
    """Plan record: the client of each slot, and nothing else."""

    def check(self, plan: StepPlan) -> None:
        self.rows += len(plan.run.counts) + len(plan.drops)
        for new in plan.new:
            sequence = self._view.slot_owner(new.slot, new.incarnation)
            assert sequence is not None
            self._places[new.slot, new.incarnation] = self._requests[untagged(sequence.request.id)], new.index


class MeasuredClients(RoutedClients):
    """Clients that count tokens and ends."""

    def delivered(self, emit: Emit) -> None:
        self.deliveries += len(emit.tokens) + len(emit.ended)
        self.tokens += len(emit.tokens)
        for ended in emit.ended:
            client_request = self._watch.requests[ended.request]
            client_request.ended[ended.index] = ended.reason
            self._answered(client_request)


class MeasuredWatch(ClusterWatch):
    """Watch that reads no block and stores no token."""

    def has_content(self, engine: SomeEngine, request: str, kept: KeptPrompt, begin: int = 0) -> bool:
        return True

    def emitted(self, emit: Emit, weights: int) -> None:
        pass


class MeasuredWorld(ClusterWorld):
    timeline_type = MeasuredTimeline
    watch_type = MeasuredWatch
    plans_type = MeasuredPlans
    clients_type = MeasuredClients

    def _engine(self, instance: SimulatedInstance) -> SimulatedEngine:
        engine = super()._engine(instance)
        worker = engine.process.worker
        engine.process.worker = MeasuredWorker(len(worker.pool), self.scenario.block_size, engine.plans.client_of)
        return engine

    def _after_each(self) -> None:
        pass

    def _rest(self) -> None:
        pass
