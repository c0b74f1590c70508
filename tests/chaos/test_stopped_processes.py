"""A process that is stopped says nothing: /health does. And when it goes on, so does everything."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from chaos_server import Server, until
from test_process_death import Asked

GREEDY = {"prompt": "The quick brown fox", "max_tokens": 64, "temperature": 0, "return_token_ids": True, "ignore_eos": True}


@pytest.mark.parametrize("role", ["worker", pytest.param("engine", marks=pytest.mark.slow)])
def test_health_is_red_while_a_process_is_stopped_and_green_again_after(tiny: Path, tmp_path: Path, role: str):
    with Server(tiny, tmp_path, orders={"delay": [1, 0.05]}).wait_ready() as server:
        alone = server.ask("/v1/completions", GREEDY).tokens
        assert server.ask("/health").status == 200
        process, begun = server.process(role), []
        asked = Asked(server, {**GREEDY, "stream": True}, begun.append)
        until(lambda: len(begun) > 2, "tokens come")
        process.send(signal.SIGSTOP)
        red = until(lambda: reply if (reply := server.ask("/health")).status == 503 else None, "health is red")
        assert ("no progress" if role == "worker" else "did not answer") in red.json["error"]["message"]
        assert server.ask("/live").status == 200
        assert server.ask("/ready").status == 503
        process.send(signal.SIGCONT)
        until(lambda: server.ask("/health").status == 200, "health is green again")
        reply = asked.wait()
        assert reply is not None
        assert reply.tokens == alone, "and nothing was lost by it"
