"""An engine that is killed is started again, and every open answer goes on there: the tokens of an undisturbed run, once."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from chaos_model import make_model
from chaos_server import Process, Reply, Server, ask, until

PLAIN = {"prompt": "The quick brown fox", "max_tokens": 64, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
SEEDED = {**PLAIN, "prompt": "Lorem ipsum", "temperature": 1.0, "seed": 4711}
LIST = {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 8}, "minItems": 20}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {**PLAIN, "stream": True, "stream_options": {"include_usage": True}},
    "seeded": {**SEEDED, "stream": True, "presence_penalty": 0.5},
    "two": {**SEEDED, "n": 2, "stream": True, "stream_options": {"include_usage": True}},
    "logprobs": {**PLAIN, "prompt": "dolor sit", "stream": True, "logprobs": 2},
    "grammar": {**PLAIN, "prompt": "sit", "stream": True, "guided_regex": "[a-f]{50}[0-9]{30}"},
    "schema": {**SEEDED, "prompt": "tempor", "n": 2, "stream": True, "guided_json": LIST},
    "echo": {**PLAIN, "prompt": "amet", "logprobs": 1, "echo": True},
    "whole": {**SEEDED, "prompt": "consectetur", "n": 2, "logprobs": 1},
}


def choices(reply: Reply) -> dict[int, Any]:
    """All that a client sees of each choice, whatever pieces it came in."""
    assert reply.status == 200, reply.content
    parts = reply.events or [reply.json]
    if reply.events:
        assert reply.complete, reply.content[-300:]
    seen: dict[int, Any] = {}
    for part in parts:
        for choice in part["choices"]:
            one = seen.setdefault(choice["index"], {"text": "", "tokens": [], "logprobs": [], "finish": None})
            one["text"] += choice["text"]
            one["tokens"] += choice["token_ids"]
            one["logprobs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
            one["finish"] = choice["finish_reason"] or one["finish"]
    return seen


def completion_tokens(reply: Reply) -> int | None:
    usages = [part["usage"] for part in reply.events or [reply.json] if part.get("usage")]
    return usages[-1]["completion_tokens"] if usages else None


def lost_in_mid_stream(
    server: Server, bodies: dict[str, dict[str, Any]], after: int, number: int = signal.SIGKILL
) -> dict[str, Reply]:
    """All at once. The engine gets the signal when each stream has had so many pieces, and is long from its end."""
    engine, worker = server.process("engine"), server.process("worker")
    pieces = {name: 0 for name, body in bodies.items() if body.get("stream")}

    async def one(name: str) -> Reply:
        def count(data: bytes) -> None:
            pieces[name] = pieces.get(name, 0) + data.count(b'"token_ids"')
            if all(pieces[each] >= after for each in pieces):
                engine.send(number)

        return await ask(server.port, "/v1/completions", bodies[name], on_bytes=count)

    async def everything() -> list[Reply]:
        return await asyncio.gather(*map(one, bodies))

    replies = dict(zip(bodies, asyncio.run(everything()), strict=True))
    assert not engine.alive
    assert not worker.alive
    return replies


def stop_string(text: str) -> str:
    """Something of the later half that is not in the earlier one."""
    place = next(place for place in range(len(text) // 2, len(text)) if text.index(text[place : place + 3]) == place)
    return text[place : place + 3]


def test_every_open_answer_goes_on_with_another_engine(tiny: Path, tmp_path: Path):
    with Server(tiny, tmp_path, orders={"delay": [1, 0.05]}, slots=16).wait_ready() as server:
        bodies = dict(BODIES)
        whole = choices(server.ask("/v1/completions", {**PLAIN, "prompt": "stops"}))[0]["text"]
        bodies["stopped"] = {**PLAIN, "prompt": "stops", "stop": [stop_string(whole)], "stream": True}
        alone = {name: server.ask("/v1/completions", body) for name, body in bodies.items()}
        assert choices(alone["stopped"])[0]["finish"] == "stop"
        assert len(choices(alone["two"])) == 2
        first: Process = server.process("engine")
        replies = lost_in_mid_stream(server, bodies, after=12)
        for name, reply in replies.items():
            assert choices(reply) == choices(alone[name]), name
            assert completion_tokens(reply) == completion_tokens(alone[name]), name
        assert server.process("engine").pid != first.pid
        assert server.output.count("RESTART the engine process was killed by SIGKILL") == 1
        assert choices(server.ask("/v1/completions", bodies["whole"])) == choices(alone["whole"])
        server.wait_idle()
        assert "Traceback" not in server.errors
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait_ended() == 0


@pytest.mark.slow
def test_an_answer_that_repeats_itself_ends_at_the_same_token_with_another_engine(tiny: Path, tmp_path: Path):
    """The tokens of the lost engine count: the answer is one token over and over, and ends at the 40th."""
    rule = {"repetition_detection": {"max_pattern_size": 3, "min_count": 40}}
    constant = {**PLAIN, "max_tokens": 120, "logit_bias": {"11": 100}, **rule, "stream": True}
    passage = {**PLAIN, "max_tokens": 200, "guided_regex": "(abc){200}", "stop_on_repetition": True, "stream": True}
    bodies = {"constant": constant, "passage": passage}
    with Server(tiny, tmp_path, orders={"delay": [1, 0.05]}, slots=16).wait_ready() as server:
        alone = {name: server.ask("/v1/completions", body) for name, body in bodies.items()}
        whole = {name: choices(reply)[0] for name, reply in alone.items()}
        assert (whole["constant"]["tokens"], whole["constant"]["finish"]) == ([11] * 40, "stop")
        assert (whole["passage"]["text"][:6], whole["passage"]["finish"]) == ("abcabc", "length"), "not a whole document"
        assert len(whole["passage"]["tokens"]) == 128
        for name, reply in lost_in_mid_stream(server, bodies, after=12).items():
            assert choices(reply)[0] == whole[name], name
            assert [part["choices"][0].get("ended_by") for part in reply.events if part["choices"]][-1] == "repetition"


def require_turned_away(server: Server) -> None:
    reply = server.ask("/v1/completions", PLAIN)
    assert (reply.status, "try again later" in reply.json["error"]["message"]) == (503, True)
    assert [server.ask(path).status for path in ("/live", "/health", "/ready")] == [200, 503, 503]


@pytest.mark.slow
def test_without_an_engine_new_requests_are_turned_away_and_the_next_one_serves_them(tiny: Path, tmp_path: Path):
    """It is killed again while it is starting: that is no reason to give up."""
    orders = {"gate": {"at": "loading", "folder": str(tmp_path)}}
    (tmp_path / "open").touch()
    with Server(tiny, tmp_path, orders=orders).wait_ready() as server:
        for path in ("open", "reached"):
            (tmp_path / path).unlink()
        server.process("engine").send(signal.SIGKILL)
        for again in (True, False):
            until((tmp_path / "reached").exists, "the next worker is loading")
            require_turned_away(server)
            if again:
                (tmp_path / "reached").unlink()
                server.process("engine").send(signal.SIGKILL)
        (tmp_path / "open").touch()
        until(lambda: server.ask("/ready").status == 200, "another engine is ready")
        assert server.ask("/v1/completions", PLAIN).status == 200
        assert server.output.count("RESTART") == 2


@pytest.mark.parametrize("victim", ["worker", pytest.param("cache", marks=pytest.mark.slow)])
def test_an_answer_outlives_its_engine_and_what_the_next_one_was_starting(tiny: Path, tmp_path: Path, victim: str):
    """Found by an audit: an engine that could not start because its worker was killed ended the server, answers and all."""
    orders = {"gate": {"at": "loading", "folder": str(tmp_path)}, "delay": [1, 0.05]}
    (tmp_path / "open").touch()
    with Server(tiny, tmp_path, orders=orders, kv_host_gib=0.01).wait_ready() as server:
        alone = server.ask("/v1/completions", {**SEEDED, "stream": True})
        for path in ("open", "reached"):
            (tmp_path / path).unlink(missing_ok=True)
        engine = server.process("engine")

        def kill(data: bytes) -> None:
            engine.send(signal.SIGKILL)

        async def disturbed() -> Reply:
            asked = asyncio.create_task(ask(server.port, "/v1/completions", {**SEEDED, "stream": True}, on_bytes=kill))
            await asyncio.to_thread(until, (tmp_path / "reached").exists, "the next worker is loading")
            await asyncio.to_thread(require_turned_away, server)
            if victim == "worker":
                server.process("worker").send(signal.SIGKILL)
                (tmp_path / "open").touch()
            else:
                (tmp_path / "open").touch()
                await asyncio.to_thread(until, lambda: "cache" in server._found(), "there is a cache service")
                server.process("cache").send(signal.SIGKILL)
            return await asked

        reply = asyncio.run(disturbed())
        assert choices(reply) == choices(alone)
        assert server.ask("/v1/completions", PLAIN).status == 200
        server.wait_idle()
        assert "Traceback" not in server.errors


@pytest.mark.parametrize("victim", [pytest.param("worker", marks=pytest.mark.slow), "engine"])
def test_an_answer_does_not_go_on_with_other_weights(tmp_path: Path, victim: str):
    """Found by an audit: the model's files were replaced on the disk, and the rest of the answer was another model's."""
    model, other = make_model(tmp_path / "model"), make_model(tmp_path / "other", seed=8)
    with Server(model, tmp_path / "server", orders={"delay": [1, 0.05]}).wait_ready() as server:
        alone = server.ask("/v1/completions", PLAIN).json
        process = server.process(victim)

        def replace_and_kill(data: bytes) -> None:
            if (path := other / "model.safetensors").exists():
                path.rename(model / "model.safetensors")
                process.send(signal.SIGKILL)

        reply = server.ask("/v1/completions", {**PLAIN, "stream": True}, on_bytes=replace_and_kill)
        assert "other weights are served now" in reply.events[-1]["error"]["message"]
        tokens = [token for event in reply.events[:-1] for token in event["choices"][0]["token_ids"]]
        assert tokens == alone["choices"][0]["token_ids"][: len(tokens)]
        until(lambda: server.ask("/ready").status == 200, "it serves the others")
        after = server.ask("/v1/completions", PLAIN).json
        assert after["choices"][0]["token_ids"] != alone["choices"][0]["token_ids"]
        assert after["system_fingerprint"] != alone["system_fingerprint"]
        server.wait_idle()


@pytest.mark.slow
def test_a_server_that_is_stopped_while_it_has_no_engine_ends_its_requests(tiny: Path, tmp_path: Path):
    orders = {"gate": {"at": "loading", "folder": str(tmp_path)}, "delay": [1, 0.2]}
    (tmp_path / "open").touch()
    with Server(tiny, tmp_path, orders=orders, drain_seconds_max=1.0).wait_ready() as server:
        for path in ("open", "reached"):
            (tmp_path / path).unlink()
        engine = server.process("engine")

        def kill(data: bytes) -> None:
            engine.send(signal.SIGKILL)

        async def stopped() -> Reply:
            asked = asyncio.create_task(ask(server.port, "/v1/completions", {**PLAIN, "stream": True}, on_bytes=kill))
            await asyncio.to_thread(until, (tmp_path / "reached").exists, "the next worker is loading")
            server.popen.send_signal(signal.SIGTERM)
            return await asked

        reply = asyncio.run(stopped())
        assert reply.events[-1]["error"]["code"] == "shutting_down"
        assert server.wait_ended() == 0
        server.require_all_gone()


def test_an_engine_that_is_lost_again_and_again_ends_the_server_with_clean_errors(tiny: Path, tmp_path: Path):
    with Server(tiny, tmp_path, orders={"delay": [1, 0.2]}).wait_ready() as server:

        def kill_all() -> None:
            """The first, and five restarts; none of them gets as far as being ready."""
            for restarts in range(6):
                until(lambda restarts=restarts: server.output.count("RESTART") == restarts, "the loss is seen")
                server.process("engine").send(signal.SIGKILL)

        async def both() -> tuple[Reply, None]:
            begun = asyncio.Event()
            body = {**PLAIN, "stream": True}
            asked = asyncio.create_task(ask(server.port, "/v1/completions", body, on_bytes=lambda data: begun.set()))
            await asyncio.wait_for(begun.wait(), 60)
            return await asyncio.gather(asked, asyncio.to_thread(kill_all))

        reply, _ = asyncio.run(both())
        assert not reply.complete
        assert "the engine is gone" in reply.events[-1]["error"]["message"]
        assert server.wait_ended() == 1
        assert "ERROR the engine process was killed by SIGKILL" in server.errors
        assert "Traceback" not in server.errors
        server.require_all_gone()
