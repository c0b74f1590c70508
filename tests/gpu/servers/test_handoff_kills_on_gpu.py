"""Everybody is killed in mid hand-off, both instances on one GPU: the quick cases of tests/chaos/test_handoff_kills.py, and
cache services, because the KV pool on a GPU must outlive the cache service that has created it. All cases: BATON_SLOW."""

import itertools
import signal

import pytest
import test_handoff_kills
from chaos_server import until
from test_handoff_kills import (  # noqa: F401
    NUMBERS,
    PHASES,
    QUICK,
    VICTIMS,
    alone,
    body,
    cluster,
    handoffs,
    model,
    test_a_client_that_leaves_in_any_phase_leaves_nothing,
    test_a_worker_that_stands_still_holds_nobody_up,
    test_prompts_are_handed_over_and_the_answer_is_the_same,
    told,
)

CACHE_SERVICES = {
    ("H2 in the second chunk", "prefill-0/cache", "SIGKILL"),
    ("H3 prompt computed, nothing copied", "prefill-0/cache", "SIGSTOP"),
    ("H5 second chunk copied", "prefill-0/cache", "SIGKILL"),
    ("H5 second chunk copied", "decode-0/cache", "SIGKILL"),
    ("H6 copied, not released", "prefill-0/cache", "SIGTERM"),
    ("H8 about to decode", "decode-0/cache", "SIGKILL"),
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK | CACHE_SERVICES else pytest.mark.slow, id=" ".join(case))
    for case in itertools.product(PHASES, VICTIMS, ("SIGKILL", "SIGSTOP", "SIGTERM"))
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("phase", "victim", "number"), CASES)
def test_a_hand_off_survives(cluster, alone, phase, victim, number):  # noqa: F811
    test_handoff_kills.test_a_hand_off_survives(cluster, alone, phase, victim, number)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_hand_offs_go_on_after_a_cache_service_was_killed(cluster, alone, name):  # noqa: F811
    """The next cache service attaches to the pool of the one before, which the engine has kept. It could not while the pool
    was the dead process's own (CUDA IPC): then no hand-off worked any more."""
    cluster.wait_all_there()
    for victim in (f"{name}/cache", f"{name}/worker"):  # the next worker attaches to it as well
        cluster.process(victim).send(signal.SIGKILL)
        before = handoffs(cluster)

        def handed_over(before=before):
            request = body(next(NUMBERS))
            assert told(cluster.ask("/v1/completions", request)) == told(alone.ask("/v1/completions", request))
            return handoffs(cluster) > before

        until(handed_over, f"a prompt is handed over after {victim} was killed")
