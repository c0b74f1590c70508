"""Whether a prompt is handed over: by policy, by length, and by what it costs as measured."""

from __future__ import annotations

from random import Random

import pytest

from baton.config import RouterConfig
from baton.core.cluster.membership import Membership
from baton.core.cluster.placement import TRY_AGAIN, Candidate, Placement
from baton.protocol.node import Beat


class Somebody:
    beat = Beat(token_seconds=0.001)


def stays(placement: Placement, uncached: int) -> bool:
    return placement.stays(Candidate(Somebody(), uncached))


def placement(**settings) -> Placement:
    config = RouterConfig(handoff_tokens_min=100, handoff_seconds_start=0.5, **settings)
    return Placement(config, Membership(config), {}, Random(1))


@pytest.mark.parametrize(("policy", "short", "cheap", "long"), [("auto", 1, 1, 0), ("always", 0, 0, 0), ("never", 1, 1, 1)])
def test_policy_length_and_cost(policy, short, cheap, long):
    made = placement(handoff=policy)
    assert [stays(made, tokens) for tokens in (99, 400, 600)] == [short, cheap, long]


def test_a_hand_off_that_was_slow_once_is_tried_again():
    made = placement()
    for _ in range(100):
        made.measured(60.0)
    assert sum(not stays(made, 400) for _ in range(4 * TRY_AGAIN)) == 4
    for _ in range(100):
        made.measured(0.001)
    assert not any(stays(made, 400) for _ in range(4 * TRY_AGAIN))
