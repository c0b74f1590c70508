"""One seed or one scenario, of a single node or of a cluster: how it is made and run, for whoever does not care which it is."""

from __future__ import annotations

from baton.sim.cluster.front_world import FrontWorld
from baton.sim.cluster.generate import generate_cluster
from baton.sim.cluster.world import ClusterWorld
from baton.sim.generate import generate
from baton.sim.outcome import Outcome
from baton.sim.scenario import Scenario
from baton.sim.world import PlainWorld, Tracer


def make(seed: int, *, cluster: bool) -> Scenario:
    return generate_cluster(seed) if cluster else generate(seed)


def run(scenario: Scenario, tracer: Tracer | None = None) -> Outcome:
    if scenario.cluster is None:
        return PlainWorld(scenario, tracer).run()
    if scenario.cluster.front:
        return FrontWorld(scenario, tracer.note if tracer is not None else None).run()
    return ClusterWorld(scenario, tracer.note if tracer is not None else None).run()
