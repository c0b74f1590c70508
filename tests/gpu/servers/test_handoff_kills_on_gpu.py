"""Everybody is killed in mid hand-off, both instances on one GPU: the quick cases of tests/chaos/test_handoff_kills.py."""

import pytest
import test_handoff_kills
from test_handoff_kills import (  # noqa: F401
    QUICK,
    alone,
    cluster,
    model,
    test_a_client_that_leaves_in_any_phase_leaves_nothing,
    test_a_worker_that_stands_still_holds_nobody_up,
    test_prompts_are_handed_over_and_the_answer_is_the_same,
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("phase", "victim", "number"), sorted(QUICK))
def test_a_hand_off_survives(cluster, alone, phase, victim, number):  # noqa: F811
    test_handoff_kills.test_a_hand_off_survives(cluster, alone, phase, victim, number)
