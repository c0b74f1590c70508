"""A worker that dies or stands still is replaced, and the client's stream goes on with exactly the same tokens."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from chaos_server import Process, Server, ask, children, until
from chaos_shared import SharedServers

GREEDY = {"prompt": "The quick brown fox", "max_tokens": 48, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
SAMPLED = {**GREEDY, "prompt": "Lorem ipsum dolor", "temperature": 1.0, "seed": 4711, "n": 2}
DEADLY = 253
"""To a worker: a token that neither of them has, and no answer to them."""


def disturbed(server: Server, number: int, after: int) -> dict[int, dict[int, list[int]]]:
    """Both requests as streams; the worker gets the signal when so many tokens have come."""
    worker = server.process("worker")
    seen = 0

    def count(data: bytes) -> None:
        nonlocal seen
        seen += data.count(b'"token_ids"')
        if seen >= after:
            worker.send(number)

    async def both() -> list:
        return await asyncio.gather(
            *(ask(server.port, "/v1/completions", {**body, "stream": True}, on_bytes=count) for body in (GREEDY, SAMPLED))
        )

    replies = asyncio.run(both())
    assert all(reply.complete for reply in replies), [reply.content[-300:] for reply in replies]
    assert seen >= after
    until(lambda: not worker.alive, "the disturbed worker is gone")
    return {place: reply.tokens for place, reply in enumerate(replies)}


@pytest.fixture
def server(tiny: Path, shared_servers: SharedServers) -> Server:
    # Three seconds for a step are an age for this model, also on a busy machine.
    return shared_servers.of(tiny, orders={"delay": [1, 0.01], "dies_on_token": DEADLY}, step_seconds_max=3.0)


def test_a_request_that_kills_its_worker_is_given_up_and_the_next_one_is_served(server: Server):
    poison = server.ask("/v1/completions", {**GREEDY, "prompt": [5, DEADLY, 6]})
    assert poison.status == 500
    assert "lost twice" in poison.json["error"]["message"]
    until(lambda: server.ask("/health").status == 200, "another worker is there")
    assert server.ask("/v1/completions", GREEDY).status == 200
    assert server.metrics()["baton:crash_ends_total"] == 1


def test_killed_and_stalled_workers_change_nothing(server: Server):
    """The last one: it ends the server."""
    alone = {place: server.ask("/v1/completions", body).tokens for place, body in enumerate((GREEDY, SAMPLED))}
    assert [len(tokens) for tokens in alone[1].values()] == [48, 48]
    assert alone[1][0] != alone[1][1]
    assert all(DEADLY not in tokens for tokens in (*alone[0].values(), *alone[1].values()))
    before = server.metrics()
    assert disturbed(server, signal.SIGKILL, after=20) == alone
    assert disturbed(server, signal.SIGSTOP, after=30) == alone
    numbers = server.wait_idle()
    assert numbers["baton:worker_losses_total"] >= before["baton:worker_losses_total"] + 2
    assert numbers["baton:crash_ends_total"] == before["baton:crash_ends_total"]
    engine = server.process("engine")
    assert len(children(engine.pid)) == 1, "a dead worker was not waited for"
    assert "no result of a step in time" in server.errors
    server.popen.send_signal(signal.SIGTERM)
    assert server.wait_ended() == 0


@pytest.mark.slow
def test_three_kills_under_24_streams_cost_no_answer(tiny: Path, tmp_path: Path):
    """The case of the review: within 6 s, where 2 of 48 streams ended with "the worker was lost twice"."""
    bodies = [{**SAMPLED, "n": 1, "max_tokens": 40, "seed": number, "prompt": f"Lorem {number}"} for number in range(8)]
    with Server(tiny, tmp_path, orders={"delay": [1, 0.01]}).wait_ready() as server:
        alone = [server.ask("/v1/completions", body).tokens for body in bodies]
        seen, kills = 0, [60, 300, 540]

        def count(data: bytes) -> None:
            nonlocal seen
            seen += data.count(b'"token_ids"')
            if kills and seen >= kills[0]:
                kills.pop(0)
                server.process("worker").send(signal.SIGKILL)

        async def all_of_them() -> list:
            streams = [ask(server.port, "/v1/completions", {**body, "stream": True}, on_bytes=count) for body in bodies * 3]
            return await asyncio.gather(*streams)

        replies = asyncio.run(all_of_them())
        assert not kills
        assert all(reply.complete for reply in replies), [reply.content[-300:] for reply in replies]
        assert [reply.tokens for reply in replies] == alone * 3
        numbers = server.wait_idle()
        assert (numbers["baton:worker_losses_total"], numbers["baton:crash_ends_total"]) == (3, 0)


@pytest.mark.slow
def test_a_worker_that_cannot_be_replaced_ends_the_server_with_clean_errors(tiny: Path, tmp_path: Path):
    """Whoever supervises the server from outside sees it end, and may start it again."""
    with Server(tiny, tmp_path, orders={"delay": [1, 0.01], "dies_from": 2}).wait_ready() as server:
        worker = server.process("worker")
        stream = server.ask("/v1/completions", {**GREEDY, "stream": True}, on_bytes=lambda _: worker.send(signal.SIGKILL))
        assert not stream.complete
        assert stream.events[-1]["error"]["message"] == "the worker was lost too often in a row"
        assert server.wait_ended() == 1
        assert "ERROR the worker was lost 6 time(s) in a row" in server.errors  # the first, and five restarts
        assert "Traceback" not in server.errors
        server.require_all_gone()


def test_an_idle_server_uses_no_cpu(alone: Server):
    """CPU seconds of the processes over a stretch of idleness; how long that really was does not matter."""
    assert alone.ask("/v1/completions", GREEDY).status == 200
    alone.wait_idle()
    roles = ("supervisor", "front", "engine", "worker")
    processes: dict[str, Process] = {role: alone.process(role) for role in roles}
    before = {role: process.cpu_seconds for role, process in processes.items()}
    with pytest.raises(AssertionError, match="in vain"):
        until(lambda: None, "nothing happens", 4.0)
    used = {role: processes[role].cpu_seconds - before[role] for role in roles}
    print("idle CPU seconds in 4 s:", used)
    assert used["worker"] <= 0.02
    assert used["engine"] <= 0.02
    assert used["supervisor"] <= 0.02
    assert used["front"] <= 0.2  # uvicorn looks around ten times a second
