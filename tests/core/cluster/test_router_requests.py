"""Requests without faults: every kind of cluster serves every kind of request, with the tokens of an undisturbed run."""

from __future__ import annotations

import pytest

from baton.config import RouterConfig

from .harness import Room, request

CLUSTERS = [
    ("mixed",),
    ("prefill", "decode"),
    ("prefill",),
    ("decode",),
    ("prefill", "prefill", "decode", "decode"),
    ("mixed", "prefill", "decode"),
]


@pytest.mark.parametrize("roles", CLUSTERS, ids="-".join)
@pytest.mark.parametrize("policy", ["prefix", "load"])
@pytest.mark.parametrize("n", [1, 3])
def test_whoever_lives_serves(roles, policy, n):
    room = Room(*roles, config=RouterConfig(policy=policy, handoff_tokens_min=8))
    for number in range(6):
        room.arrive(request(f"r{number}", tokens=20 + number, n=n))
    room.run()
    for number in range(6):
        room.assert_right(f"r{number}")
    pairs = {"prefill", "decode"} <= set(roles)
    assert (room.router.stats.handoffs > 0) == pairs
