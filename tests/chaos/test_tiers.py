"""Lower tiers with real processes: whatever tier a prefix comes from, and whatever happens to it on the way, the answer is that
of an undisturbed run."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from chaos_server import Reply, Server, ask, until

SLOW = {"delay": [1, 0.01]}
"""A worker that takes its time, as one with a real model does: else nothing would be worth loading."""
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "and",
    "runs",
    "into",
    "deep",
    "woods",
    "where",
    "nobody",
]


def prompt(number: int, words: int = 40) -> str:
    return " ".join(WORDS[(number * 7 + place * (1 + number % 5)) % len(WORDS)] for place in range(words))


def body(number: int, **given: Any) -> dict[str, Any]:
    sampled = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
    return {"prompt": prompt(number), "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, **sampled, **given}


def by_tier(reply: Reply) -> dict[str, int]:
    assert reply.status == 200, reply.content
    details = reply.json["usage"]["prompt_tokens_details"]
    found: dict[str, int] = details.get("cached_tokens_by_tier", {"device": details["cached_tokens"], "host": 0, "storage": 0})
    assert sum(found.values()) == details["cached_tokens"]
    return found


def answers(server: Server, numbers: range) -> list[dict[int, list[int]]]:
    return [server.ask("/v1/completions", body(number)).tokens for number in numbers]


@pytest.fixture(scope="module")
def undisturbed(alone: Server) -> list[dict[int, list[int]]]:
    """Without anything cached."""
    alone.ask("/v1/cache/clear", {})
    return answers(alone, range(8))


def moved(server: Server, way: str) -> float:
    return server.metrics().get(f'baton:kv_blocks_moved_total{{way="{way}"}}', 0.0)


def settled(server: Server, way: str) -> float:
    """Until no more blocks go that way."""
    seen = [-1.0]

    def still() -> float | None:
        seen.append(moved(server, way))
        return seen[-1] if seen[-1] == seen[-2] and seen[-1] > 0 else None

    return until(still, f"blocks go {way}")


def flood(server: Server) -> None:
    """Other prompts take the device's blocks."""
    for number in range(100, 103):
        server.ask("/v1/completions", body(number, prompt=prompt(number, 150)))


def test_a_prefix_that_the_device_has_lost_comes_from_the_host(tiny: Path, tmp_path: Path, undisturbed):
    settings = {"kv_host_gib": 0.05, "kv_blocks": 160}
    with Server(tiny, tmp_path, orders=SLOW, **settings).wait_ready() as server:
        assert answers(server, range(4)) == undisturbed[:4]
        settled(server, "device_to_host")
        flood(server)
        replies = [server.ask("/v1/completions", body(number)) for number in range(4)]
        assert [reply.tokens for reply in replies] == undisturbed[:4]
        assert sum(by_tier(reply)["host"] for reply in replies) > 0
        assert moved(server, "host_to_device") > 0
        server.process("cache").send(signal.SIGKILL)
        assert answers(server, range(4, 8)) == undisturbed[4:]
        server.process("cache")  # another one
        until(lambda: server.metrics()["baton:kv_service_up"] == 1, "it takes moves")
        flood(server)
        replies = [server.ask("/v1/completions", body(number)) for number in range(8)]
        assert [reply.tokens for reply in replies] == undisturbed
        assert sum(by_tier(reply)["host"] for reply in replies) > 0  # what was complete outlived the service
        server.wait_idle()
        assert "Traceback" not in server.errors


def damage(folder: Path, every: int) -> int:
    """One byte of every so-many-th object is another."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 256)
    assert files
    for path in files[::every]:
        content = bytearray(path.read_bytes())
        content[len(content) * 2 // 3] ^= 0x10
        path.write_bytes(content)
    return len(files[::every])


def test_a_warm_file_tier_serves_the_next_server_and_another_one_beside_it(tiny: Path, tmp_path: Path, undisturbed):
    store = tmp_path / "kv"
    settings = {"kv_storage": f"file:{store}", "kv_blocks": 160}
    with Server(tiny, tmp_path / "first", orders=SLOW, **settings).wait_ready() as first:
        assert answers(first, range(4)) == undisturbed[:4]
        settled(first, "host_to_storage")
        labels = {path.stem.split("-")[1] for path in store.rglob("*.kv")}
        assert labels == {first.ask("/config").json["plan"]["kv_identity"]}, "an operator finds the model's blocks"
        with Server(tiny, tmp_path / "beside", orders=SLOW, **settings).wait_ready() as beside:
            replies = [beside.ask("/v1/completions", body(number)) for number in range(4)]
            assert [reply.tokens for reply in replies] == undisturbed[:4]
            assert sum(by_tier(reply)["storage"] for reply in replies) > 0
            assert answers(beside, range(4, 8)) == undisturbed[4:]
            settled(beside, "host_to_storage")
    damaged = damage(store, 10)
    with Server(tiny, tmp_path / "next", orders=SLOW, **settings).wait_ready() as after:
        replies = [after.ask("/v1/completions", body(number)) for number in range(8)]
        assert [reply.tokens for reply in replies] == undisturbed
        assert sum(by_tier(reply)["storage"] for reply in replies) > 0
        assert damaged > 0
        assert "Traceback" not in after.errors


@pytest.mark.slow  # the real model's is test_tiers_smollm2.py
def test_storage_that_fails_is_said_in_the_log_and_so_is_its_return(tiny: Path, tmp_path: Path, undisturbed):
    """Found by an audit: nothing but a metric told of it, so a wrong password was a cache that never had anything."""
    store, away = tmp_path / "kv", tmp_path / "away"
    failing, again = "KV storage is left alone for a while, to write: ", "KV storage is used again, to write"
    with Server(tiny, tmp_path / "server", orders=SLOW, kv_storage=f"file:{store}", kv_blocks=160).wait_ready() as server:

        def said_while_serving(words: str) -> bool:
            server.ask("/v1/cache/clear", {})
            assert answers(server, range(8)) == undisturbed
            return words in server.errors

        store.rename(away)
        until(lambda: said_while_serving(failing), "it is left alone")
        assert f"{failing}KV storage {store}: No such file or directory" in server.errors
        away.rename(store)
        until(lambda: said_while_serving(again), "it is used again")
        assert (server.errors.count(failing), server.errors.count(again)) == (1, 1)


@pytest.mark.parametrize("policy", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("drop", "host")), "storage"])
def test_preempted_requests_end_as_if_nothing_had_happened(policy: str, tiny: Path, tmp_path: Path, undisturbed):
    tiers: dict[str, Any] = {"kv_host_gib": 0.05} if policy != "storage" else {"kv_storage": f"file:{tmp_path / 'kv'}"}
    settings = {**tiers, "preempted_kv": policy, "kv_write": "selective", "kv_blocks": 110, "slots": 8}
    longer = [body(number, max_tokens=60) for number in range(8)]
    with Server(tiny, tmp_path, orders=SLOW, **settings).wait_ready() as server:

        async def together() -> list[Reply]:
            return await asyncio.gather(*(ask(server.port, "/v1/completions", each) for each in longer))

        replies = asyncio.run(together())
        for number, reply in enumerate(replies):
            assert reply.tokens[0][:12] == undisturbed[number][0]
        assert server.metrics()["baton:preemptions_total"] > 0
        alone = [server.ask("/v1/completions", each) for each in longer]
        assert [reply.tokens for reply in alone] == [reply.tokens for reply in replies]
        if policy != "drop":
            assert moved(server, "device_to_host") > 0
        server.wait_idle()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_storage": "nowhere://x"}, "no KV storage for nowhere"),
        ({"kv_host_gib": 900_000}, "kv_host_gib is 900000, and this machine has"),
    ],
    ids=["storage", "host"],
)
def test_a_tier_that_cannot_work_is_told_at_the_start(tiny: Path, tmp_path: Path, settings: dict[str, Any], words: str):
    with Server(tiny, tmp_path, **settings) as server:
        assert server.wait_ended() != 0
        assert words in server.output + server.errors
        assert "Traceback" not in server.errors
