"""An error needs a fault that happened: what is only scheduled, or cannot cause it, excuses nothing."""

from __future__ import annotations

from typing import get_args

from test_cluster_rehearsal import pair

from baton.core.cluster.events import FailRequest
from baton.protocol.ids import RequestId
from baton.sim.excuses import EXCUSES, FaultLog
from baton.sim.linked_world import ClusterWorld
from baton.sim.scenario import ClusterFault, ClusterFaultKind, Scenario, StepFault, StepFaultKind


def test_every_kind_of_fault_is_in_the_table():
    assert {*get_args(ClusterFaultKind), *get_args(StepFaultKind)} <= set(EXCUSES)


def test_a_fault_excuses_what_it_can_cause_from_then_on():
    log = FaultLog()
    log.add(5.0, "drain")
    log.add(6.0, "crash_amid")
    assert (log.excuses("delay", 5.0), log.excuses("refusal", 5.5), log.excuses("move", 0.0)) == (2, 1, 1)
    assert log.excuses("poison", 6.5) == 0


def broken_off_for_nothing(scenario: Scenario) -> bool:
    """Is it found when the first answer of the run breaks off after its first token?"""
    world = ClusterWorld(scenario)
    delivered = world.clients.delivered

    def breaks_off(emit):
        delivered(emit)
        world.clients.delivered = delivered
        world.clients.broken_off(FailRequest(RequestId("r0"), "worker_gone", "lost"))

    world.clients.delivered = breaks_off
    return "is broken off for nothing" in world.run().violation


def test_faults_that_are_only_scheduled_excuse_nothing():
    later = pair(migrations_max=0)
    later.cluster.instances[0].steps = [StepFault(step, "crash_amid") for step in range(300, 360)]
    assert broken_off_for_nothing(later)
    assert broken_off_for_nothing(pair(ClusterFault("drain", at=0.0, target=1, seconds=0.05), migrations_max=0))
    assert not broken_off_for_nothing(pair(ClusterFault("cut", at=0.01, target=0), migrations_max=0))
