"""A process that is stopped says nothing: /health does. It goes on, and so does everything; or it is killed and replaced."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from chaos_server import Server, until
from chaos_shared import SharedServers
from test_engine_loss import BODIES, choices, lost_in_mid_stream
from test_process_death import Asked

GREEDY = {"prompt": "The quick brown fox", "max_tokens": 64, "temperature": 0, "return_token_ids": True, "ignore_eos": True}


SLOW = {"delay": [1, 0.05]}


@pytest.fixture
def server(tiny: Path, shared_servers: SharedServers) -> Server:
    return shared_servers.of(tiny, orders={**SLOW, "silent_seconds_max": 6.0})


def test_health_is_red_while_a_worker_is_stopped_and_green_again_after(server: Server):
    require_red_while_stopped(server, "worker", "no progress")


@pytest.mark.slow
def test_health_is_red_while_an_engine_is_stopped_and_green_again_after(tiny: Path, tmp_path: Path):
    with Server(tiny, tmp_path, orders=SLOW).wait_ready() as server:
        require_red_while_stopped(server, "engine", "did not answer")


def require_red_while_stopped(server: Server, role: str, reason: str) -> None:
    alone = server.ask("/v1/completions", GREEDY).tokens
    assert server.ask("/health").status == 200
    process, begun = server.process(role), []
    asked = Asked(server, {**GREEDY, "stream": True}, begun.append)
    until(lambda: len(begun) > 2, "tokens come")
    process.send(signal.SIGSTOP)
    red = until(lambda: reply if (reply := server.ask("/health")).status == 503 else None, "health is red")
    assert reason in red.json["error"]["message"]
    assert server.ask("/live").status == 200
    assert server.ask("/ready").status == 503
    process.send(signal.SIGCONT)
    until(lambda: server.ask("/health").status == 200, "health is green again")
    reply = asked.wait()
    assert reply is not None
    assert reply.tokens == alone, "and nothing was lost by it"


def test_an_engine_that_stays_stopped_is_replaced_and_a_front_ends_the_server(server: Server):
    """As after SIGKILL (test_engine_loss.py): every answer goes on with another engine, each token once. The last one: it ends
    the server."""
    bodies = {name: BODIES[name] for name in ("greedy", "two", "echo")}
    alone = {name: server.ask("/v1/completions", body) for name, body in bodies.items()}
    for name, reply in lost_in_mid_stream(server, bodies, after=12, number=signal.SIGSTOP).items():
        assert choices(reply) == choices(alone[name]), name
    text = "process said nothing for 6 s and was killed"
    assert server.output.count(f"RESTART the engine {text}") == 1
    numbers = server.wait_idle()
    assert [numbers[f'baton:child_hangs_total{{child="{name}"}}'] for name in ("engine", "front")] == [1, 0]
    server.process("front").send(signal.SIGSTOP)
    assert server.wait_ended() == 1
    assert f"ERROR the front {text}" in server.errors
    assert "Traceback" not in server.errors
