"""Hand-offs between instances that share no memory: the KV goes over TCP. Everybody is killed, stopped or ended while bytes are
on their way, and the client gets the tokens of an undisturbed run, once. A fast part runs everywhere, all with BATON_SLOW."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_disturbed import DisturbedCluster
from chaos_server import Server
from test_handoff_kills import (
    INSTANCES,
    NUMBERS,
    VICTIMS,
    alone,
    body,
    disturbed,
    handoffs,
    model,
    pools_of,
    require_as_undisturbed,
    told,
)

__all__ = ["alone", "model"]  # fixtures

PHASES: dict[str, tuple[str, str, int]] = {
    "H3 prompt computed, nothing copied": ("decode-0", "pull", 0),
    "bytes are asked for": ("prefill-0", "send", 0),
    "some bytes have arrived": ("prefill-0", "send", 2),
    "H6 copied, not released": ("decode-0", "Release", 0),
}
QUICK = {
    ("bytes are asked for", "prefill-0/cache", "SIGKILL"),
    ("some bytes have arrived", "prefill-0", "SIGKILL"),
    ("some bytes have arrived", "prefill-0/cache", "SIGSTOP"),
    ("some bytes have arrived", "decode-0/cache", "SIGKILL"),
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=" ".join(case))
    for case in itertools.product(PHASES, VICTIMS, ("SIGKILL", "SIGSTOP", "SIGTERM"))
]


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisturbedCluster]:
    settings = {"tokens_per_step": 64, "decode_gap_ms": 0.0, "prefill_tokens_beside_decodes": 64}
    settings |= {"orders": {"far": True}, "transfer_address": "127.0.0.1:0"}
    with DisturbedCluster(model, tmp_path_factory.mktemp("cluster"), INSTANCES, **settings).wait_ready() as cluster:
        yield cluster


def test_prompts_are_handed_over_and_the_answer_is_the_same(cluster: DisturbedCluster, alone: Server):
    cluster.wait_all_there()
    before, requests = handoffs(cluster), [body(next(NUMBERS), temperature=heat) for heat in (0.0, 1.0)]
    for request in requests:
        assert told(cluster.ask("/v1/completions", request)) == told(alone.ask("/v1/completions", request))
    assert handoffs(cluster) == before + 2
    assert [pools_of(cluster.process(f"{name}/cache").pid) for name in INSTANCES] == [1, 1], "nobody maps another's pool"
    cluster.wait_idle()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("phase", "victim", "number"), CASES)
def test_a_hand_off_survives(cluster: DisturbedCluster, alone: Server, phase: str, victim: str, number: str):
    request, reply = asyncio.run(disturbed(cluster, PHASES[phase], victim, number))
    require_as_undisturbed(cluster, alone, request, reply)
