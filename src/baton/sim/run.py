"""Make a scenario from a seed, and run a scenario, of any kind."""

from __future__ import annotations

from typing import Literal

from baton.sim.generate import generate
from baton.sim.generate_cluster import generate_cluster
from baton.sim.generate_front import generate_front
from baton.sim.linked_world import ClusterWorld, FrontWorld
from baton.sim.outcome import Outcome
from baton.sim.scenario import Scenario
from baton.sim.world import PlainWorld, Tracer, World

Kind = Literal["instance", "cluster", "front"]
"""Kind of a scenario: one instance, several behind routers, or one behind the front of `baton serve`."""
GENERATORS = {"instance": generate, "cluster": generate_cluster, "front": generate_front}


def make(seed: int, kind: Kind = "instance") -> Scenario:
    return GENERATORS[kind](seed)


def kind_of(scenario: Scenario) -> Kind:
    return "instance" if scenario.cluster is None else "front" if scenario.cluster.front else "cluster"


def run(scenario: Scenario, tracer: Tracer | None = None) -> Outcome:
    worlds: dict[Kind, type[World]] = {"instance": PlainWorld, "cluster": ClusterWorld, "front": FrontWorld}
    return worlds[kind_of(scenario)](scenario, tracer).run()
