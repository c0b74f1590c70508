"""A real Redis as storage of a real server: found again by another server, and no answer is lost when it goes away and comes
back, is full, or loses what it had."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "kvcache"))

from chaos_server import Server, until
from redis_server import RedisServer
from test_rank_kills import RANKS
from test_tiers import SLOW, answers, body, by_tier, moved, settled, undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server")]
__all__ = ["undisturbed"]

COUNT = "return #redis.call('KEYS', ARGV[1])"
HALVE = "for place, name in ipairs(redis.call('KEYS', ARGV[1])) do if place % 2 == 1 then redis.call('DEL', name) end end"
"""Scripts for the server itself, about objects of one rank."""


def circuit(server: Server, way: str) -> str:
    metrics = server.metrics()
    states = ("closed", "half_open", "open")
    return next(state for state in states if metrics[f'baton:kv_circuit_state{{state="{state}",way="{way}"}}'])


def test_redis_goes_away_and_comes_back_and_no_answer_is_lost(tiny: Path, tmp_path: Path, undisturbed):
    (tmp_path / "redis").mkdir()
    redis = RedisServer(tmp_path / "redis")
    try:
        settings = {"kv_storage": f"redis://127.0.0.1:{redis.port}/0", "kv_blocks": 160}
        with Server(tiny, tmp_path / "first", orders=SLOW, **settings).wait_ready() as server:
            assert answers(server, range(4)) == undisturbed[:4]
            stored = settled(server, "host_to_storage")
            with Server(tiny, tmp_path / "beside", orders=SLOW, **settings).wait_ready() as beside:
                replies = [beside.ask("/v1/completions", body(number)) for number in range(4)]
                assert [reply.tokens for reply in replies] == undisturbed[:4]
                assert sum(by_tier(reply)["storage"] for reply in replies) > 0
            redis.stop()
            for _ in range(3):  # asked, and failed, until it is left alone
                server.ask("/v1/cache/clear", {})
                assert answers(server, range(8)) == undisturbed
            assert {circuit(server, "read"), circuit(server, "write")} <= {"open", "half_open"}
            assert server.metrics()['baton:kv_circuit_opened_total{way="read"}'] > 0
            redis.start()  # empty

            def stored_again() -> bool:
                server.ask("/v1/cache/clear", {})
                assert answers(server, range(8)) == undisturbed
                return moved(server, "host_to_storage") > stored

            until(stored_again, "blocks go to the Redis that came back", 90.0)
            assert redis.ask("DBSIZE") != b":0\r\n"
            server.wait_idle()
            assert "Traceback" not in server.errors
    finally:
        redis.stop()


def test_a_redis_that_is_full_still_gives_what_it_has(tiny: Path, tmp_path: Path, undisturbed):
    (tmp_path / "redis").mkdir()
    redis = RedisServer(tmp_path / "redis", "--maxmemory-policy", "noeviction")
    try:
        settings = {"kv_storage": f"redis://127.0.0.1:{redis.port}/0", "kv_blocks": 160}
        with Server(tiny, tmp_path / "first", orders=SLOW, **settings).wait_ready() as server:
            assert answers(server, range(4)) == undisturbed[:4]
            settled(server, "host_to_storage")
            redis.ask("CONFIG", "SET", "maxmemory", "1")
            assert answers(server, range(4, 8)) == undisturbed[4:]

            def refused() -> float:
                return server.metrics()['baton:kv_blocks_not_moved_total{why="put_failures"}']

            until(refused, "a write is refused")
            server.ask("/v1/cache/clear", {})
            replies = [server.ask("/v1/completions", body(number)) for number in range(4)]
            assert [reply.tokens for reply in replies] == undisturbed[:4]
            assert sum(by_tier(reply)["storage"] for reply in replies) > 0
            assert circuit(server, "read") == "closed"
    finally:
        redis.stop()


def test_each_rank_has_objects_of_its_own_and_one_that_is_missing_is_a_miss(tiny: Path, tmp_path: Path):
    """Of the blocks that another server of two ranks has stored. Half of the second rank's are deleted."""
    (tmp_path / "redis").mkdir()
    redis = RedisServer(tmp_path / "redis")
    try:
        settings = {"kv_storage": f"redis://127.0.0.1:{redis.port}/0", "kv_blocks": 160, **RANKS}
        with Server(tiny, tmp_path / "first", orders=SLOW, prefix_caching=False, **RANKS).wait_ready() as server:
            expected = answers(server, range(4))
        with Server(tiny, tmp_path / "stores", orders=SLOW, **settings).wait_ready() as server:
            assert answers(server, range(4)) == expected
            settled(server, "host_to_storage")
        first, second = (redis.ask("EVAL", COUNT, 0, f"*-r{rank}") for rank in range(2))
        assert first == second != b":0\r\n"
        found = []
        for folder in ("whole", "halved"):
            with Server(tiny, tmp_path / folder, orders=SLOW, **settings).wait_ready() as server:
                replies = [server.ask("/v1/completions", body(number)) for number in range(4)]
                assert [reply.tokens for reply in replies] == expected
                found.append(sum(by_tier(reply)["storage"] for reply in replies))
                server.wait_idle()
                assert "Traceback" not in server.errors
            redis.ask("EVAL", HALVE, 0, "*-r1")
        assert found[0] > found[1] >= 0
    finally:
        redis.stop()
