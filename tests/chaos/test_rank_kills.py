"""Ranks are killed and stopped in every phase of a hand-off from two ranks to two, and with lower tiers: the client gets the
tokens of an undisturbed run, once."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_disturbed import DisturbedCluster
from chaos_server import Process, Server, children, role_of, until
from test_handoff_kills import INSTANCES, NUMBERS, PHASES, body, disturbed, handoffs, require_as_undisturbed, told
from test_tiers import SLOW, answers, by_tier, flood, settled
from test_tiers import body as short_body

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS = {"tensor_parallel_size": 2, "quantization": "none"}
STEPS = {"tokens_per_step": 64, "decode_gap_ms": 0.0, "prefill_tokens_beside_decodes": 64}
VICTIMS = ("prefill-0/worker.1", "decode-0/worker.1", "decode-0/worker", "prefill-0/cache.1", "decode-0/cache.1")
CASES = [
    pytest.param(*case, id=" ".join(case)) for case in itertools.product(PHASES, VICTIMS, ("SIGKILL", "SIGSTOP", "SIGTERM"))
]


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The undisturbed run, of one instance."""
    with Server(tiny, tmp_path_factory.mktemp("alone"), **RANKS).wait_ready() as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisturbedCluster]:
    with DisturbedCluster(tiny, tmp_path_factory.mktemp("cluster"), INSTANCES, **STEPS, **RANKS).wait_ready() as cluster:
        yield cluster


def test_prompts_are_handed_over_from_rank_to_rank(cluster: DisturbedCluster, alone: Server):
    cluster.wait_all_there()
    before = handoffs(cluster)
    for changes in ({}, {"temperature": 0}, {"presence_penalty": 0.7}):
        request = body(next(NUMBERS), **changes)
        assert told(cluster.ask("/v1/completions", request)) == told(alone.ask("/v1/completions", request)), changes
    assert handoffs(cluster) == before + 3
    cluster.wait_idle()


def test_a_pair_that_cannot_read_each_other_computes_prompts_again(cluster: DisturbedCluster, alone: Server):
    """As on two machines between which the transfer ports of the ranks are closed."""
    cluster.wait_all_there()
    with cluster.held("decode-0", "transport"):

        def given_up() -> bool:
            request = body(next(NUMBERS))
            assert told(cluster.ask("/v1/completions", request)) == told(alone.ask("/v1/completions", request))
            return cluster.number_of("baton:router_paths_given_up_total") > 0

        until(given_up, "prompts are not computed twice any more")
        assert cluster.number_of("baton:router_handoff_ends_total", outcome="not_copied") >= 3
    cluster.wait_idle()


@pytest.mark.parametrize(("phase", "victim", "number"), CASES)
def test_a_hand_off_survives_the_end_of_a_rank(cluster: DisturbedCluster, alone: Server, phase: str, victim: str, number: str):
    cluster.wait_all_there()
    request, reply = asyncio.run(disturbed(cluster, PHASES[phase], victim, number))
    require_as_undisturbed(cluster, alone, request, reply)


def ranks_of(server: Server, role: str) -> list[Process]:
    """All processes of that role, waited for."""

    def found() -> list[Process]:
        pids = sorted(pid for pid in children(server.process("engine").pid) if role_of(pid) == role)
        return [Process(pid) for pid in pids] if len(pids) == 2 else []

    return until(found, f"both ranks of the {role} are there")


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, list[int]]]:
    """Two ranks, without any cache."""
    with Server(tiny, tmp_path_factory.mktemp("undisturbed"), prefix_caching=False, **RANKS).wait_ready() as server:
        return answers(server, range(8))


def test_host_tier_and_storage_of_two_ranks(tiny: Path, tmp_path: Path, undisturbed: list[Any]):
    """Blocks come back from the host, after the loss of a rank's service, and from storage in the next life. A damaged object
    of one rank is a miss of the whole block."""
    storage = tmp_path / "storage"
    settings = {"kv_host_gib": 0.05, "kv_blocks": 160, "kv_storage": f"file:{storage}", **RANKS}
    with Server(tiny, tmp_path / "first", orders=SLOW, **settings).wait_ready() as server:
        assert answers(server, range(4)) == undisturbed[:4]
        settled(server, "host_to_storage")
        flood(server)
        replies = [server.ask("/v1/completions", short_body(number)) for number in range(4)]
        assert [reply.tokens for reply in replies] == undisturbed[:4]
        assert sum(by_tier(reply)["host"] for reply in replies) > 0
        ranks_of(server, "cache")[1].send(signal.SIGKILL)
        assert answers(server, range(4, 8)) == undisturbed[4:]
        until(lambda: server.metrics()["baton:kv_service_up"] == 1, "it takes moves")
        ranks_of(server, "worker")[1].send(signal.SIGKILL)
        assert answers(server, range(8)) == undisturbed
        server.wait_idle()
        assert "Traceback" not in server.errors
    assert {path.name.rpartition("-r")[2] for path in storage.rglob("*.kv")} == {"0.kv", "1.kv"}
    for path in sorted(storage.rglob("*-r1.kv"))[::2]:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with Server(tiny, tmp_path / "second", orders=SLOW, **settings).wait_ready() as server:
        replies = [server.ask("/v1/completions", short_body(number)) for number in range(8)]
        assert [reply.tokens for reply in replies] == undisturbed
        assert sum(by_tier(reply)["storage"] for reply in replies) > 0
        server.wait_idle()


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP", "SIGTERM"])
@pytest.mark.parametrize("rank", [0, 1])
def test_streams_survive_the_end_of_a_rank(tiny: Path, tmp_path: Path, alone: Server, rank: int, number: str):
    request = body(next(NUMBERS), max_tokens=200)
    with Server(tiny, tmp_path, orders={"delay": [1, 0.01]}, step_seconds_max=3.0, **RANKS).wait_ready() as server:

        async def struck() -> Any:
            asked = asyncio.create_task(server_ask(server, request))
            await asyncio.to_thread(
                until, lambda: server.metrics()["baton:requests_running"] > 0 or asked.done(), "it is running"
            )
            victims = await asyncio.to_thread(ranks_of, server, "worker")
            victims[rank].send(getattr(signal, number))
            return await asked

        assert told(asyncio.run(struck())) == told(alone.ask("/v1/completions", request))
        server.wait_idle()


async def server_ask(server: Server, request: dict[str, Any]) -> Any:
    return await asyncio.to_thread(server.ask, "/v1/completions", request)
