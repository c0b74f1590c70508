"""A measured cluster does what the rehearsed one does, without the proofs."""

from baton.sim.linked_world import ClusterWorld
from baton.sim.measure import MeasuredWorld
from baton.sim.scenario import VOCAB, Client, Cluster, InstanceSpec, Scenario


def busy(roles: tuple[str, ...]) -> Scenario:
    clients = [Client(f"r{n}", 0.01 * n, [(5 * n + k) % VOCAB for k in range(9 + n % 5)], 4 + n % 7, seed=n) for n in range(40)]
    instances = [InstanceSpec(role, 24, 4, 16) for role in roles]
    return Scenario(1, 0, 4, 0, 0, clients, cluster=Cluster(instances, routers=2))


def test_a_measured_cluster_takes_the_same_time_as_a_rehearsed_one():
    for roles in (("mixed", "mixed"), ("prefill", "decode", "mixed")):
        rehearsed, measured = ClusterWorld(busy(roles)).run(), MeasuredWorld(busy(roles)).run()
        assert rehearsed.invariant is None, rehearsed.violation
        assert measured.invariant is None, measured.violation
        assert (measured.events, measured.heap_events) == (rehearsed.events, rehearsed.heap_events)
        assert (measured.tokens, measured.virtual_seconds) == (rehearsed.tokens, rehearsed.virtual_seconds)
