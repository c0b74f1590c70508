"""Everybody is killed, stopped or ended in every phase of a hand-off: the client gets the tokens of an undisturbed run, once.

Short phases are held open by disturbed workers and messengers (chaos_gates.py). A fast part runs everywhere, all of it with
BATON_SLOW, and on the real model with BATON_REAL_MODEL (make chaos runs it so).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_disturbed import DisturbedCluster
from chaos_server import PATIENCE_SECONDS, Reply, Server, ask, until
from chaos_shared import SharedServers

INSTANCES = {"prefill-0": "prefill", "decode-0": "decode"}
PHASES: dict[str, tuple[str, str, int]] = {
    "H1 queued on prefill": ("prefill-0", "plan", 0),
    "H2 in the second chunk": ("prefill-0", "plan", 1),
    "H3 prompt computed, nothing copied": ("decode-0", "pull", 0),
    "H4 room is kept, nobody knows": ("decode-0", "Reserved", 0),
    "H5 second chunk copied": ("decode-0", "pull", 1),
    "H6 copied, not released": ("decode-0", "Release", 0),
    "H7 released, nobody knows": ("prefill-0", "Released", 0),
    "H8 about to decode": ("decode-0", "plan", 0),
}
"""Who is held where, and how many pass before."""
VICTIMS = ("prefill-0", "decode-0", "prefill-0/worker", "decode-0/worker", "prefill-0/cache", "decode-0/cache")
QUICK = {
    ("H3 prompt computed, nothing copied", "prefill-0", "SIGKILL"),
    ("H5 second chunk copied", "decode-0", "SIGKILL"),
    ("H6 copied, not released", "prefill-0", "SIGSTOP"),
    ("H7 released, nobody knows", "decode-0", "SIGTERM"),
    ("H8 about to decode", "decode-0/worker", "SIGKILL"),
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=" ".join(case))
    for case in itertools.product(PHASES, VICTIMS, ("SIGKILL", "SIGSTOP", "SIGTERM"))
]
REAL_MODEL = bool(os.environ.get("BATON_REAL_MODEL"))
REPEATS = 12 if REAL_MODEL else 3
"""Of a sentence: a prompt of three chunks, and of the tiny model every byte is a token."""
NUMBERS = itertools.count()
"""A prompt of its own for each: one that is cached is not handed over."""


def body(number: int, **changes: Any) -> dict[str, Any]:
    prompt = f"{number:04d} " + "the quick brown fox jumps over the lazy dog; " * REPEATS
    settings = {"max_tokens": 40, "temperature": 1.0, "seed": number, "return_token_ids": True, "ignore_eos": True}
    return {"prompt": prompt, "stream": True, "logprobs": 1, "stream_options": {"include_usage": True}, **settings, **changes}


def told(reply: Reply) -> dict[str, Any]:
    """All that a client sees, whatever pieces it came in."""
    assert reply.status == 200, reply.content
    assert reply.complete, reply.content[-400:]
    choices = [part["choices"][0] for part in reply.events if part["choices"]]
    usage = reply.events[-1]["usage"]
    return {
        "tokens": [token for choice in choices for token in choice["token_ids"]],
        "logprobs": [value for choice in choices for value in (choice["logprobs"] or {}).get("token_logprobs", [])],
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": (usage["prompt_tokens"], usage["completion_tokens"]),
    }


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue("smollm2_path" if REAL_MODEL else "tiny")
    return path


@pytest.fixture(scope="module")
def alone(model: Path, shared_servers: SharedServers) -> Server:
    """The undisturbed run: one instance, no router."""
    return shared_servers.of(model)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisturbedCluster]:
    settings = {"tokens_per_step": 64, "decode_gap_ms": 0.0, "prefill_tokens_beside_decodes": 64}
    with DisturbedCluster(model, tmp_path_factory.mktemp("cluster"), INSTANCES, **settings).wait_ready() as cluster:
        yield cluster


async def disturbed(
    cluster: DisturbedCluster, place: tuple[str, str, int], victim: str, number: str
) -> tuple[dict[str, Any], Reply]:
    """Asks; when somebody is held at that place the victim gets its signal. One that was stopped goes on when the answer is
    there.

    An instance that was lost a moment ago is left alone for a while: a request that is not handed over is followed by
    another."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        request = body(next(NUMBERS))
        with cluster.held(*place) as reached:
            asked = asyncio.create_task(ask(cluster.port, "/v1/completions", request))
            await asyncio.to_thread(until, lambda reached=reached, asked=asked: reached.exists() or asked.done(), str(place))
            if asked.done():
                continue
            process = cluster.process(victim)
            process.send(getattr(signal, number))
        try:
            return request, await asked
        finally:
            process.send(signal.SIGCONT)
    raise AssertionError(f"in vain: {place} is reached")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("phase", "victim", "number"), CASES)
def test_a_hand_off_survives(cluster: DisturbedCluster, alone: Server, phase: str, victim: str, number: str):
    request, reply = asyncio.run(disturbed(cluster, PHASES[phase], victim, number))
    require_as_undisturbed(cluster, alone, request, reply)


def require_as_undisturbed(cluster: DisturbedCluster, alone: Server, request: dict[str, Any], reply: Reply) -> None:
    assert told(reply) == told(alone.ask("/v1/completions", request))
    cluster.open_all()
    cluster.wait_all_there()
    cluster.wait_idle()
    assert told(cluster.ask("/v1/completions", request)) == told(reply), "the next request works"
    require_no_stray_pools(cluster)
    assert "Traceback" not in cluster.errors


def require_no_stray_pools(cluster: DisturbedCluster) -> None:
    """A pool that was replaced, or whose owner is dead, is unmapped by everybody: an engine has one open, a worker maps one,
    a cache service its own and its peer's."""
    allowed = {"worker": 1, "cache": len(INSTANCES)}
    for role in [role for role in cluster.roles if "/" in role]:
        pid = cluster.process(role).pid
        until(
            lambda pid=pid, role=role: pools_of(pid) <= allowed[role.partition("/")[2].partition(".")[0]],
            f"{role} has unmapped old pools",
        )


def pools_of(pid: int) -> int:
    """KV pools that it maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return len({line.split()[4] for line in lines if "memfd:baton-kv" in line})


def test_prompts_are_handed_over_and_the_answer_is_the_same(cluster: DisturbedCluster, alone: Server):
    cluster.wait_all_there()
    before = handoffs(cluster)
    requests = {
        "plain": body(next(NUMBERS)),
        "greedy": body(next(NUMBERS), temperature=0),
        "one token": body(next(NUMBERS), max_tokens=1),
        "penalties": body(next(NUMBERS), presence_penalty=0.7, repetition_penalty=1.3),
        "unlikely": body(next(NUMBERS), min_tokens=20, ignore_eos=False),
    }
    for name, request in requests.items():
        assert told(cluster.ask("/v1/completions", request)) == told(alone.ask("/v1/completions", request)), name
    assert handoffs(cluster) == before + len(requests) - 1, "of one token there is nothing to hand over"
    cluster.wait_idle()


def test_a_worker_that_stands_still_holds_nobody_up(cluster: DisturbedCluster, alone: Server):
    """Its engine speaks on, and would wait for the step for a minute. It is stopped until the answer is there."""
    cluster.wait_all_there()
    request, before = body(next(NUMBERS), max_tokens=60), moved(cluster)

    async def stopped_amid() -> Reply:
        with cluster.held("decode-0", "plan", 5) as reached:
            asked = asyncio.create_task(ask(cluster.port, "/v1/completions", request))
            await asyncio.to_thread(until, reached.exists, "it decodes")
            worker = cluster.process("decode-0/worker")
            worker.send(signal.SIGSTOP)
        try:
            return await asked
        finally:
            assert await asyncio.to_thread(moved, cluster) > before
            worker.send(signal.SIGCONT)

    reply = asyncio.run(stopped_amid())
    assert told(reply) == told(alone.ask("/v1/completions", request))
    cluster.wait_all_there()
    cluster.wait_idle()
    assert told(cluster.ask("/v1/completions", request)) == told(reply), "the next request works"


def moved(cluster: DisturbedCluster) -> int:
    return cluster.ask("/v1/cluster").json["counters"]["moved"]


def test_a_client_that_leaves_in_any_phase_leaves_nothing(cluster: DisturbedCluster):
    cluster.wait_all_there()

    async def leave(phase: str) -> None:
        with cluster.held(*PHASES[phase]) as reached:
            asked = asyncio.create_task(ask(cluster.port, "/v1/completions", body(next(NUMBERS))))
            await asyncio.to_thread(until, lambda: reached.exists() or asked.done(), f"{phase} is reached")
            asked.cancel()
            await asyncio.wait([asked])

    for phase in PHASES:
        asyncio.run(leave(phase))
        cluster.wait_idle()


def handoffs(cluster: DisturbedCluster) -> float:
    return sum(value for name, value in cluster.metrics().items() if name.startswith("baton:router_handoffs_total"))


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_router_breaks_its_streams_and_nothing_else(cluster: DisturbedCluster, alone: Server, phase: str):
    """Its own clients see the end of the connection. Instances drop what it had, and serve the next one."""
    cluster.wait_all_there()

    async def broken() -> Reply | None:
        """None: it was not handed over."""
        with cluster.held(*PHASES[phase]) as reached:
            asked = asyncio.create_task(ask(cluster.port, "/v1/completions", body(next(NUMBERS), max_tokens=300)))
            await asyncio.to_thread(until, lambda: reached.exists() or asked.done(), f"{phase} is reached")
            if asked.done():
                return None
            cluster.process("router").send(signal.SIGKILL)
        return await asked

    with pytest.raises((OSError, EOFError)):
        until(lambda: asyncio.run(broken()), "its connection ends")
    until(lambda: answers(cluster), "another router serves")
    cluster.wait_all_there()
    cluster.wait_idle()
    require_no_stray_pools(cluster)
    request = body(next(NUMBERS))
    assert told(cluster.ask("/v1/completions", request)) == told(alone.ask("/v1/completions", request))


def answers(cluster: DisturbedCluster) -> bool:
    try:
        return cluster.ask("/ready").status == 200
    except (OSError, EOFError):
        return False
