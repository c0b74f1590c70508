"""Two ranks park the KV of preempted answers and write back what would be evicted: the answers are those of an undisturbed run
of two ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_disturbed import DisturbedCluster
from chaos_server import Server, until
from test_decode_preemption import (
    ALWAYS_LOADS,
    INSTANCES,
    SLOW,
    SMALL,
    STREAMS,
    all_at_once,
    of_decode,
    preemptions,
    require_undisturbed,
)
from test_rank_kills import RANKS
from test_tiers import answers, by_tier, flood, moved
from test_tiers import body as short_body

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two ranks with room for everybody."""
    with Server(tiny, tmp_path_factory.mktemp("alone"), **RANKS).wait_ready() as server:
        yield server


@pytest.mark.parametrize("lowest", ["host", "storage"])
def test_preempted_answers_of_two_ranks_go_on_from_parked_kv(tiny: Path, tmp_path: Path, alone: Server, lowest: str):
    tiers = {"kv_host_gib": 0.01, "preempted_kv": lowest}
    tiers |= {"kv_storage": f"file:{tmp_path / 'blocks'}"} if lowest == "storage" else {}
    settings = {"orders": {**SLOW, **ALWAYS_LOADS}, **SMALL, **tiers, **RANKS}
    with DisturbedCluster(tiny, tmp_path, INSTANCES, **settings).wait_ready() as cluster:
        numbers = range(100, 100 + STREAMS)
        require_undisturbed(asyncio.run(all_at_once(cluster, numbers)), alone, numbers)
        until(lambda: preemptions(cluster) > 0, "the decode instance has preempted")
        until(lambda: of_decode(cluster, "host_to_device") > 0, "its KV was loaded again")
        cluster.wait_idle()


def test_blocks_that_two_ranks_write_back_are_found_on_the_host(tiny: Path, tmp_path: Path, alone: Server):
    settings = {"kv_host_gib": 0.05, "kv_blocks": 160, "kv_write": "back", **RANKS}
    expected = answers(alone, range(8))
    with Server(tiny, tmp_path, orders=SLOW, **settings).wait_ready() as server:
        assert answers(server, range(8)) == expected
        flood(server)
        assert moved(server, "device_to_host") > 0
        replies = [server.ask("/v1/completions", short_body(number)) for number in range(8)]
        assert [reply.tokens for reply in replies] == expected
        assert sum(by_tier(reply)["host"] for reply in replies) > 0
        server.wait_idle()
        assert "Traceback" not in server.errors
