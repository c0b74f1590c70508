"""The shared storage tier as the path of last resort: where decode cannot read the pool of prefill, it finds the blocks of the
prompt on storage, or computes them; the answer is that of an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_disturbed import DisturbedCluster
from chaos_server import Server, until

INSTANCES = {"prefill-0": "prefill", "decode-0": "decode"}
SLOW = {"delay": [1, 0.02]}
"""Workers that take their time, as with a real model: else nothing would be worth loading."""


def body(number: int, **changes: Any) -> dict[str, Any]:
    prompt = f"{number:03d} " + "a prompt that is long enough to be worth a hand-off; " * 4
    settings = {"max_tokens": 12, "temperature": 1.0, "seed": number, "return_token_ids": True, "ignore_eos": True}
    return {"prompt": prompt, **settings, **changes}


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisturbedCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    settings = {"tokens_per_step": 64, "kv_storage": f"file:{folder / 'blocks'}", "kv_host_gib": 0.01, "kv_write": "through"}
    with DisturbedCluster(tiny, folder, INSTANCES, orders=SLOW, **settings).wait_ready() as cluster:
        yield cluster


def on_storage(cluster: DisturbedCluster) -> float:
    """Until nothing more is put there."""
    seen = [-1.0]

    def settled() -> float | None:
        seen.append(cluster.number_of("baton:kv_blocks_moved_total", way="host_to_storage", instance="prefill-0"))
        return seen[-1] if seen[-1] == seen[-2] and seen[-1] > 0 else None

    return until(settled, "blocks are put on storage")


def fetched(cluster: DisturbedCluster) -> float:
    return cluster.number_of("baton:kv_blocks_moved_total", way="storage_to_host", instance="decode-0")


def adopted(cluster: DisturbedCluster, what: str) -> float:
    return cluster.number_of("baton:instance_handoffs_total", what=what, instance="decode-0")


def test_a_broken_transport_costs_time_and_nothing_else(cluster: DisturbedCluster, alone: Server):
    cluster.wait_all_there()
    expected = {number: alone.ask("/v1/completions", body(number)).tokens for number in (1, 2)}
    first = cluster.ask("/v1/completions", body(1, max_tokens=1))  # computed by prefill, for nobody else
    assert first.status == 200, first.content
    on_storage(cluster)
    with cluster.held("decode-0", "transport"):
        reply = cluster.ask("/v1/completions", body(1))
        assert reply.tokens == expected[1]
        until(lambda: adopted(cluster, "not_adopted") == 1, "its copy failed")  # numbers come once a second
        until(lambda: fetched(cluster) > 0, "it was found on storage")
        again = cluster.ask("/v1/completions", body(2))  # nothing of it is on storage when it is asked for, or all, or a part
        assert again.tokens == expected[2]
        numbers = iter(range(3, 60))

        def given_up() -> bool:
            request = body(next(numbers))
            assert cluster.ask("/v1/completions", request).tokens == alone.ask("/v1/completions", request).tokens
            return cluster.number_of("baton:router_paths_given_up_total") > 0

        until(given_up, "prompts are not computed twice any more")
        assert cluster.number_of("baton:router_handoff_ends_total", outcome="not_copied") >= 3
    cluster.wait_idle()


def test_when_the_transport_works_again_prompts_are_copied(cluster: DisturbedCluster, alone: Server):
    cluster.wait_all_there()
    before, numbers = adopted(cluster, "adopted"), iter(range(60, 160))

    def copied() -> bool:
        """On a slow machine an instance may be suspect just now: then another request is asked."""
        request = body(next(numbers))
        assert cluster.ask("/v1/completions", request).tokens == alone.ask("/v1/completions", request).tokens
        return adopted(cluster, "adopted") > before

    until(copied, "a prompt is copied")
    cluster.wait_idle()
    assert "Traceback" not in cluster.errors
