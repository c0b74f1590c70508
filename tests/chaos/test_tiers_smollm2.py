"""The real model: a prefix from the device, the host tier or a file, and a preempted request with each policy, give the tokens
of a server that caches nothing. Greedy and seeded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from chaos_server import Reply, Server, ask
from test_tiers import by_tier, moved, settled

STORY = "Once upon a time, in a village by the sea, there lived an old clockmaker who had never left his street. "
PLAIN = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
BODIES: list[dict[str, Any]] = [
    {**PLAIN, "prompt": STORY * 5 + "One morning", "temperature": 0},
    {**PLAIN, "prompt": STORY * 5 + "His name was", "temperature": 0.8, "seed": 17},
]
SETTINGS: dict[str, Any] = {"block_size": 16, "threads": 2, "kv_blocks": 64, "context_tokens_max": 512}


def tokens(server: Server, body: dict[str, Any]) -> list[int]:
    return server.ask("/v1/completions", body).tokens[0]


@pytest.fixture(scope="module")
def undisturbed(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with Server(smollm2_path, tmp_path_factory.mktemp("real"), prefix_caching=False, **SETTINGS).wait_ready() as server:
        return [tokens(server, body) for body in BODIES]


@pytest.mark.slow
def test_every_tier_gives_the_same_tokens(smollm2_path: Path, tmp_path: Path, undisturbed: list[list[int]]):
    tiers = {"kv_host_gib": 0.05, "kv_storage": f"file:{tmp_path / 'kv'}"}
    with Server(smollm2_path, tmp_path / "first", **SETTINGS, **tiers).wait_ready() as server:
        assert [tokens(server, body) for body in BODIES] == undisturbed
        settled(server, "host_to_storage")
        for clear, tier in (([], "device"), (["device"], "host"), (["device", "host"], "storage")):
            for body, owed in zip(BODIES, undisturbed, strict=True):
                if clear:
                    server.ask("/v1/cache/clear", {"tiers": clear})
                reply = server.ask("/v1/completions", body)
                assert by_tier(reply)[tier] > 64, (tier, by_tier(reply))
                assert reply.tokens[0] == owed, tier
    with Server(smollm2_path, tmp_path / "next", **SETTINGS, **tiers).wait_ready() as server:  # after a restart
        for body, owed in zip(BODIES, undisturbed, strict=True):
            reply = server.ask("/v1/completions", body)
            assert reply.tokens[0] == owed
        assert moved(server, "storage_to_host") > 0


@pytest.mark.slow  # test_tiers.py has all of them on a tiny model
@pytest.mark.parametrize("policy", ["storage", "drop", "host"])
def test_a_preempted_request_gives_the_same_tokens(policy: str, smollm2_path: Path, tmp_path: Path, undisturbed):
    tiers: dict[str, Any] = {"kv_host_gib": 0.05, "kv_storage": f"file:{tmp_path / 'kv'}", "preempted_kv": policy}
    pool = {**SETTINGS, "kv_blocks": 16, "context_tokens_max": 256, "kv_write": "selective"}
    with Server(smollm2_path, tmp_path, **pool, **tiers).wait_ready() as server:

        async def together() -> list[Reply]:
            return await asyncio.gather(*(ask(server.port, "/v1/completions", {**b, "max_tokens": 80}) for b in BODIES))

        for reply, owed in zip(asyncio.run(together()), undisturbed, strict=True):
            assert reply.tokens[0][: len(owed)] == owed
            assert len(reply.tokens[0]) == 80
        assert server.metrics()["baton:preemptions_total"] > 0
