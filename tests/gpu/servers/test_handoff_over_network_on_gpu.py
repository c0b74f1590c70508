"""Hand-offs over TCP between instances whose KV pools are on a GPU: bytes go by way of pinned memory on both sides."""

import pytest
import test_handoff_over_network
from test_handoff_kills import NUMBERS, body, handoffs, told
from test_handoff_over_network import QUICK, alone, cluster, model  # noqa: F401


def test_prompts_are_handed_over_and_the_answer_is_the_same(cluster, alone):  # noqa: F811
    cluster.wait_all_there()
    before, requests = handoffs(cluster), [body(next(NUMBERS), temperature=heat) for heat in (0.0, 1.0)]
    for request in requests:
        assert told(cluster.ask("/v1/completions", request)) == told(alone.ask("/v1/completions", request))
    assert handoffs(cluster) == before + 2
    cluster.wait_idle()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("phase", "victim", "number"), sorted(QUICK))
def test_a_hand_off_survives(cluster, alone, phase, victim, number):  # noqa: F811
    test_handoff_over_network.test_a_hand_off_survives(cluster, alone, phase, victim, number)
