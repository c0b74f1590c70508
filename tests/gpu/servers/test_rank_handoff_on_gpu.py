"""Hand-offs from two ranks to two, all of them on one GPU. Rank r reads the KV of rank r through mapped memory, and over TCP as
where each rank has a GPU of its own. A rank of either side is killed in between.

The command line refuses two ranks on one GPU; CUDA_VISIBLE_DEVICES that names it twice gives it to both, through gloo.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from chaos_disturbed import DisturbedCluster
from chaos_server import Server, until
from test_handoff_kills import INSTANCES, NUMBERS, body, disturbed, handoffs, require_as_undisturbed, told
from test_rank_kills import RANKS, STEPS, VICTIMS

PHASES: dict[tuple[str, str], tuple[str, str, int]] = {
    ("unix", "second chunk copied"): ("decode-0", "pull", 1),
    ("unix", "copied, not released"): ("decode-0", "Release", 0),
    ("tcp", "some bytes have arrived"): ("prefill-0", "send", 2),
    ("tcp", "copied, not released"): ("decode-0", "Release", 0),
}
"""By transport: who is held where, and how many pass before."""
QUICK = {
    (("unix", "second chunk copied"), "prefill-0/worker.1", "SIGKILL"),
    (("tcp", "some bytes have arrived"), "decode-0/worker.1", "SIGKILL"),
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=" ".join((*case[0], *case[1:])))
    for case in itertools.product(PHASES, VICTIMS, ("SIGKILL", "SIGSTOP", "SIGTERM"))
]

pytestmark = pytest.mark.timeout(300)

Pair = tuple[DisturbedCluster, Server]


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The cluster, and the undisturbed run of one instance. They start at the same time, which takes most of this file's."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    folder, settings = tmp_path_factory.mktemp("pair"), {**STEPS, **RANKS, "transfer_address": "127.0.0.1:0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", f"{gpu},{gpu}")
        with (
            Server(tiny, folder / "alone", **RANKS) as alone,
            DisturbedCluster(tiny, folder / "cluster", INSTANCES, **settings) as cluster,
        ):
            alone.wait_ready()
            cluster.wait_ready()
            yield cluster, alone


def through(cluster: DisturbedCluster, transport: str) -> AbstractContextManager[Any]:
    """Pulls use that transport in here."""
    return cluster.held("decode-0", "far") if transport == "tcp" else nullcontext()


def copied(cluster: DisturbedCluster, transport: str) -> float:
    return cluster.number_of("baton:kv_pulls_total", transport=transport, outcome="copied")


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_prompts_are_handed_over_from_rank_to_rank(pair: Pair, transport: str):
    cluster, alone = pair
    cluster.wait_all_there()
    before, pulls = handoffs(cluster), copied(cluster, transport)
    requests = [body(next(NUMBERS)), body(next(NUMBERS), temperature=0.0), body(next(NUMBERS), presence_penalty=0.7)]
    with through(cluster, transport):
        for request in requests:
            assert told(cluster.ask("/v1/completions", request)) == told(alone.ask("/v1/completions", request))
    assert handoffs(cluster) == before + len(requests)
    until(lambda: copied(cluster, transport) >= pulls + len(requests), f"pulls over {transport} are counted")
    cluster.wait_idle()
    assert cluster.number_of("baton:router_handoff_ends_total", outcome="not_copied") == 0


@pytest.mark.parametrize(("phase", "victim", "number"), CASES)
def test_a_hand_off_survives_the_end_of_a_rank(pair: Pair, phase: tuple[str, str], victim: str, number: str):
    cluster, alone = pair
    cluster.wait_all_there()
    with through(cluster, phase[0]):
        request, reply = asyncio.run(disturbed(cluster, PHASES[phase], victim, number))
    require_as_undisturbed(cluster, alone, request, reply)
