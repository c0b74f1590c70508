"""Two routers share a decode instance: a request of one does not starve behind the stream of the other.

A router sees room only when a heartbeat reports it, and the other fills a full instance with small requests whenever one ends.
"""

from __future__ import annotations

import pytest

from baton.sim.cluster.routed_clients import RoutedClients
from baton.sim.linked_world import ClusterWorld
from baton.sim.scenario import Client, Cluster, InstanceSpec, Scenario
from baton.sim.simulated_request import SimulatedRequest

NEVER = 1e6
STREAM_SECONDS = 4.0
"""Time in which the small requests arrive. They need about twice as long."""
AHEAD_SECONDS = 3.0
"""Bound of the time for the small requests that arrived before the large one."""
PREEMPTION_SECONDS = 0.5
"""Bound of the time for an urgent request: a heartbeat, a preemption, and its own steps."""


class TwoRouters(RoutedClients):
    """The large request asks the first router, all others the second."""

    def _submit(self, entry: tuple[SimulatedRequest, int]) -> None:
        request, _ = entry
        super()._submit((request, 0 if request.client.id == "large" else 1))


class TwoRoutersWorld(ClusterWorld):
    clients_type = TwoRouters


def seconds_of_large(room_seconds: float, *, priority: int = 0, pairs: bool = True) -> float:
    """Seconds until the large request is answered. It needs 15 of 20 blocks, a small one 3 to 5."""
    large = Client("large", 1.0, [(3 * place + 1) % 16 for place in range(56)], 4, priority=priority)
    small = [
        Client(f"s{n}", 0.02 * n, [(5 * n + place + n // 16) % 16 for place in range(9)], 12, seed=n)
        for n in range(int(STREAM_SECONDS / 0.02))
    ]
    instances = [InstanceSpec("decode" if pairs else "mixed", 20, 8, 64)]
    if pairs:
        instances.insert(0, InstanceSpec("prefill", 80, 8, 64))
    cluster = Cluster(instances, routers=2, handoff_room_seconds=room_seconds, handoff_tokens_min=1)
    sizes = {"blocks": 0, "block_size": 4, "slots": 0, "tokens_per_step": 0}
    world = TwoRoutersWorld(Scenario(seed=1, clients=[large, *small], cluster=cluster, **sizes))
    outcome = world.run()
    assert outcome.invariant is None, outcome.violation
    begun = {name: world.clients._begun[name] for name in ("large", small[-1].id)}
    assert begun[small[-1].id].last_at > 1.8 * STREAM_SECONDS, "the instance was full all the time"
    return begun["large"].last_at - begun["large"].at


def test_a_hand_off_waits_for_handoff_room_seconds_and_those_before_it_at_most():
    assert seconds_of_large(1.0) < AHEAD_SECONDS
    assert seconds_of_large(NEVER) > 1.5 * STREAM_SECONDS, "without that bound it starves behind the stream"


def test_an_urgent_hand_off_preempts_the_less_urgent_requests_of_the_other_router():
    """A router counted its own requests only, so it waited for `handoff_room_seconds`, and its prompt was not handed over."""
    assert seconds_of_large(NEVER, priority=-5) < PREEMPTION_SECONDS


@pytest.mark.parametrize(("priority", "bound"), [(0, AHEAD_SECONDS), (-5, PREEMPTION_SECONDS)])
def test_requests_that_are_not_handed_over_wait_at_the_instance_in_one_order(priority: int, bound: float):
    assert seconds_of_large(NEVER, priority=priority, pairs=False) < bound
