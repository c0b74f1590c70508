"""Decode instances run out of blocks in a real cluster, and nobody sees it: a preempted answer goes on where it was, from KV
that was parked on a lower tier or by computing it again. If its instance dies, another finds that KV on the shared tier."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_disturbed import DisturbedCluster
from chaos_server import Reply, Server, ask, until

INSTANCES = {"prefill-0": "prefill", "decode-0": "decode"}
STREAMS = 8
SMALL = {"kv_blocks": 80, "tokens_per_step": 64, "slots": STREAMS}
"""All prompts fit, and not a third of the answers."""
SLOW = {"delay": [1, 0.02]}
"""Each step takes a while: the test acts in the middle of an answer."""
ALWAYS_LOADS = {"tiers": {"spare_seconds": 60.0, "storage_seconds_max": 60.0, "load_again_after": 1}}
"""Whether loading is quicker than computing depends on the machine and its load. Here it is loaded in any case."""


def body(number: int) -> dict[str, Any]:
    prompt = f"{number:03d} one of many"
    settings = {"max_tokens": 120, "temperature": 1.0, "seed": number, "return_token_ids": True, "ignore_eos": True}
    return {"prompt": prompt, "stream": True, "logprobs": 1, **settings}


def told(reply: Reply) -> tuple[list[int], list[float]]:
    assert reply.status == 200, reply.content
    assert reply.complete, reply.content[-400:]
    choices = [part["choices"][0] for part in reply.events]
    values = [value for choice in choices for value in (choice["logprobs"] or {}).get("token_logprobs", [])]
    return [token for choice in choices for token in choice["token_ids"]], values


@pytest.fixture(scope="module")
def tiered(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisturbedCluster]:
    folder = tmp_path_factory.mktemp("tiered")
    tiers = {"kv_storage": f"file:{folder / 'blocks'}", "kv_host_gib": 0.01, "kv_write": "through"}
    with DisturbedCluster(tiny, folder, INSTANCES, orders={**SLOW, **ALWAYS_LOADS}, **SMALL, **tiers).wait_ready() as cluster:
        yield cluster


def preemptions(cluster: DisturbedCluster) -> float:
    return cluster.number_of("baton:preemptions_total", instance="decode-0")


def of_decode(cluster: DisturbedCluster, way: str) -> float:
    return cluster.number_of("baton:kv_blocks_moved_total", way=way, instance="decode-0")


def fetched_by_prefill(cluster: DisturbedCluster) -> float:
    return cluster.number_of("baton:kv_blocks_moved_total", way="storage_to_host", instance="prefill-0")


async def all_at_once(cluster: DisturbedCluster, numbers: range) -> list[Reply]:
    return await asyncio.gather(*(ask(cluster.port, "/v1/completions", body(number)) for number in numbers))


def require_undisturbed(replies: list[Reply], alone: Server, numbers: range) -> None:
    for number, reply in zip(numbers, replies, strict=True):
        assert told(reply) == told(alone.ask("/v1/completions", body(number))), number


@pytest.mark.slow
def test_preempted_answers_are_computed_again_in_place(tiny: Path, tmp_path: Path, alone: Server):
    numbers = range(STREAMS)
    with DisturbedCluster(tiny, tmp_path, INSTANCES, **SMALL).wait_ready() as cluster:
        require_undisturbed(asyncio.run(all_at_once(cluster, numbers)), alone, numbers)
        until(lambda: preemptions(cluster) > 0, "the decode instance has preempted")  # numbers come once a second
        cluster.wait_idle()


def test_preempted_answers_go_on_from_parked_kv(tiered: DisturbedCluster, alone: Server):
    numbers = range(100, 100 + STREAMS)
    require_undisturbed(asyncio.run(all_at_once(tiered, numbers)), alone, numbers)
    until(lambda: preemptions(tiered) > 0, "the decode instance has preempted")
    until(lambda: of_decode(tiered, "host_to_device") > 0, "its KV was loaded again")
    tiered.wait_idle()


def test_a_preempted_answer_whose_instance_dies_goes_on_elsewhere(tiered: DisturbedCluster, alone: Server):
    numbers, before = range(200, 200 + STREAMS), preemptions(tiered)

    async def killed_amid() -> list[Reply]:
        asked = asyncio.create_task(all_at_once(tiered, numbers))
        await asyncio.to_thread(until, lambda: asked.done() or preemptions(tiered) > before, "it has preempted")
        assert not asked.done()
        tiered.process("decode-0").send(signal.SIGKILL)
        return await asked

    require_undisturbed(asyncio.run(killed_amid()), alone, numbers)
    until(lambda: fetched_by_prefill(tiered) > 0, "the survivor found KV of the dead one on the shared tier")
    tiered.wait_all_there()
    tiered.wait_idle()
    assert "Traceback" not in tiered.errors
