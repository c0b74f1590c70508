"""A storage that finds blocks by token ids, with real processes: the example backend, installed by its entry point."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos_server import Reply, Server, until

sys.path.append(str(Path(__file__).parent.parent / "kvcache"))

from example_package import install_example

SLOW = {"delay": [1, 0.01]}
"""A worker that takes its time, as one with a real model does: else nothing would be worth loading."""
OPENING = "a prefix that all of them share, long enough to have many blocks of its own; "


def body(number: int) -> dict[str, Any]:
    sampled = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
    prompt = OPENING + f"and then number {number} goes its own way to the end"
    return {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, **sampled}


def replies(server: Server) -> list[Reply]:
    return [server.ask("/v1/completions", body(number)) for number in range(4)]


def put(server: Server) -> float:
    return server.metrics().get('baton:kv_blocks_moved_total{way="host_to_storage"}', 0.0)


def all_is_put(server: Server) -> float:
    seen = [-1.0]

    def settled() -> float | None:
        seen.append(put(server))
        return seen[-1] if seen[-1] == seen[-2] and seen[-1] > 0 else None

    return until(settled, "blocks are put")


@pytest.mark.slow
def test_a_second_server_finds_by_tokens_what_the_first_one_computed(tiny: Path, tmp_path: Path):
    with Server(tiny, tmp_path / "without", prefix_caching=False).wait_ready() as without:
        undisturbed = [reply.tokens for reply in replies(without)]
    store = tmp_path / "blocks.db"
    settings = {"kv_storage": f"tokens:{store}?blocks_max=10000", "kv_blocks": 160}
    packages = install_example(tmp_path / "packages")
    with Server(tiny, tmp_path / "first", orders=SLOW, packages=packages, **settings).wait_ready() as first:
        assert [reply.tokens for reply in replies(first)] == undisturbed
        before = all_is_put(first)
        first.process("cache").send(signal.SIGKILL)
        first.process("cache")  # another one, which says again that it wants tokens
        numbers = iter(range(10, 1000))

        def more_is_put() -> bool:
            """What is computed while no service is there is not put: so another prompt each time."""
            assert first.ask("/v1/completions", body(next(numbers))).status == 200
            return put(first) > before

        until(more_is_put, "the next service is told token ids, too")
        assert "Traceback" not in first.errors
    with Server(tiny, tmp_path / "second", orders=SLOW, packages=packages, **settings).wait_ready() as second:
        found = replies(second)
        assert [reply.tokens for reply in found] == undisturbed
        details = [reply.json["usage"]["prompt_tokens_details"] for reply in found]
        assert sum(each.get("cached_tokens_by_tier", {}).get("storage", 0) for each in details) > 0
        second.wait_idle()
        assert "Traceback" not in second.errors
