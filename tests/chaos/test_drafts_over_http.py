"""Requests with every sampling feature, in every dialect, get the same answers with drafts and without: whole bodies, whatever
happens to the server with drafts. tests/worker/test_speculation.py has the same below HTTP, for more requests."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from chaos_disturbed import DisturbedCluster
from chaos_drawn import Answer, Drawn, Request, comparable, make_drawn_model, usages
from chaos_model import make_draft_model
from chaos_server import Reply, Server, ask, until

COUNT = 150
KILL_AFTER = 60
"""Answers from one killed worker to the next."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_drawn_model(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft_model(tmp_path_factory.mktemp("draft") / "model", model)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Request], list[Any]]:
    """Requests, and their answers without drafts."""
    with Server(model, tmp_path_factory.mktemp("plain")).wait_ready() as server:
        drawn = Drawn(random.Random(32), [known_answer(server, seed) for seed in range(12)])
        requests = [drawn.request() for _ in range(COUNT)]
        return requests, compared(requests, asyncio.run(Asking(server, requests).run()))


def known_answer(server: Server, seed: int) -> Answer:
    body = {"prompt": f"hello {seed} the cat", "max_tokens": 30, "temperature": seed % 2, "seed": seed, "ignore_eos": True}
    choice = server.ask("/v1/completions", {**body, "return_token_ids": True}).json["choices"][0]
    return choice["text"], choice["token_ids"]


def compared(requests: list[Request], replies: list[Reply]) -> list[Any]:
    return [comparable(body, path, reply) for (path, body), reply in zip(requests, replies, strict=True)]


class Asking:
    """All requests, some at a time, while somebody kills a worker after every KILL_AFTER of them."""

    def __init__(self, server: Server, requests: list[Request], victim: str = "") -> None:
        self._server, self._requests, self._victim = server, requests, victim
        self._done = self.kills = 0

    async def run(self) -> list[Reply]:
        killing = asyncio.create_task(self._kill()) if self._victim else None
        seats = asyncio.Semaphore(10)
        replies = await asyncio.gather(*(self._one(path, body, seats) for path, body in self._requests))
        if killing is not None:
            await asyncio.wait_for(killing, 60)
        return replies

    async def _one(self, path: str, body: dict[str, Any], seats: asyncio.Semaphore) -> Reply:
        async with seats:
            reply = await ask(self._server.port, path, body, seconds=240)
        self._done += 1
        return reply

    async def _kill(self) -> None:
        while self._done < len(self._requests) - KILL_AFTER // 2:
            await asyncio.sleep(0.01)
            if self._done >= KILL_AFTER * (self.kills + 1):
                worker = self._server.process(self._victim)
                worker.send(signal.SIGKILL)
                self.kills += 1
                await asyncio.to_thread(
                    until, lambda pid=worker.pid: self._server.process(self._victim).pid != pid, "a new one"
                )


def check(server: Server, victim: str, expected: tuple[list[Request], list[Any]]) -> None:
    requests, without = expected
    asking = Asking(server, requests, victim)
    replies = asyncio.run(asking.run())
    for (path, body), mine, other in zip(requests, compared(requests, replies), without, strict=True):
        assert mine == other, f"{path} {json.dumps(body)}"
    assert asking.kills
    for reply in replies:
        check_usage(reply)


def check_usage(reply: Reply) -> None:
    """Accepted drafts are among the answer's tokens, and the first token is none."""
    for usage in usages(reply.events if b"data: " in reply.content else json.loads(reply.content.splitlines()[-1])):
        details = usage.get("completion_tokens_details", usage.get("output_tokens_details", usage))
        accepted, rejected = (details.get(f"{word}_prediction_tokens", 0) for word in ("accepted", "rejected"))
        assert 0 <= accepted <= max(0, usage.get("completion_tokens", usage.get("output_tokens", 0)) - 1), usage
        assert rejected >= 0, usage


def settings(speculate: str, draft: Path) -> dict[str, Any]:
    """Drafts run whatever they cost."""
    name = f"draft:{draft}" if speculate == "draft:" else speculate
    return {"orders": {"delay": [3, 0.003], "all_drafts": True}, "speculate": name, "speculative_tokens": 6}


@pytest.mark.slow
@pytest.mark.parametrize("speculate", ["auto", "draft:"])
def test_answers_in_a_small_pool_with_killed_workers(model, draft, tmp_path, expected, speculate):
    small = {"kv_blocks": 60, "context_tokens_max": 240, "kv_host_gib": 0.05}
    with Server(model, tmp_path, **small, **settings(speculate, draft)).wait_ready() as server:
        check(server, "worker", expected)
        numbers = server.wait_idle()
        assert numbers["baton:preemptions_total"] > 0
        assert numbers["baton:worker_losses_total"] > 0
        assert 0 < numbers["baton:draft_tokens_accepted_total"] <= numbers["baton:draft_tokens_total"]
        assert numbers["baton:crash_ends_total"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("speculate", ["auto", "draft:"])
def test_answers_that_are_handed_over(model, draft, tmp_path, expected, speculate):
    instances = {"prefill-0": "prefill", "decode-0": "decode"}
    with DisturbedCluster(model, tmp_path, instances, kv_blocks=160, **settings(speculate, draft)).wait_ready() as cluster:
        check(cluster, "decode-0/worker", expected)
