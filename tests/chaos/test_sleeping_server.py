"""Sleep, wake and other weights on a whole server."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest
from chaos_model import make_model
from chaos_server import ON_DEVICE, Reply, Server, ask, until

from baton.llm import LLM, SamplingParams

GREEDY = {"prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0, "return_token_ids": True, "ignore_eos": True}


def tokens(server: Server) -> dict[int, list[int]]:
    reply = server.ask("/v1/completions", GREEDY)
    assert reply.status == 200, reply.content
    return reply.tokens


def post(server: Server, path: str, body: dict | None = None) -> dict:
    reply = server.ask(path, body or {})
    assert reply.status == 200, reply.content
    return reply.json


@pytest.mark.slow  # test_a_draft_model_sleeps_and_drafts_for_other_weights does the same in passing
@pytest.mark.parametrize("settings", [{}, {"kv_host_gib": 0.01}], ids=["alone", "with a cache service"])
def test_a_server_that_slept_answers_as_before(tiny: Path, tmp_path: Path, settings: dict):
    with Server(tiny, tmp_path, **settings).wait_ready() as server:
        before, worker = tokens(server), server.process("worker")
        require_asleep(server)
        assert not worker.alive, "weights and cache are gone with it"
        assert post(server, "/v1/wake")["mode"] == "serving"
        assert tokens(server) == before
        assert server.wait_idle()["baton:worker_losses_total"] == 0


def require_asleep(server: Server) -> None:
    assert post(server, "/v1/sleep", {"drain_seconds": 20})["mode"] == "asleep"
    assert server.ask("/health").status == 200
    assert server.ask("/ready").status == 503
    assert server.ask("/v1/completions", GREEDY).status == 503
    assert server.ask("/v1/resume", {}).status == 503


def test_other_weights_are_served_and_survive_the_engine(tiny: Path, tmp_path: Path):
    other = make_model(tmp_path / "other", seed=8)
    with Server(tiny, tmp_path / "server").wait_ready() as server:
        first = tokens(server)
        fingerprint = server.ask("/config").json["model"]["fingerprint"]
        assert post(server, "/v1/weights", {"path": str(other), "drain_seconds": 20})["fingerprint"] != fingerprint
        second = tokens(server)
        assert second != first
        bad = server.ask("/v1/weights", {"path": str(tmp_path / "nothing"), "drain_seconds": 20})
        assert bad.status == 400
        assert "nothing" in bad.json["error"]["message"]
        assert tokens(server) == second, "those that were served go on"
        server.process("engine").send(signal.SIGKILL)
        reply = until(
            lambda: reply if (reply := server.ask("/v1/completions", GREEDY)).status == 200 else None, "there is another"
        )
        assert reply.tokens == second, "the next engine has them too"
        assert post(server, "/v1/weights", {"path": str(tiny), "drain_seconds": 20})["fingerprint"] == fingerprint
        assert tokens(server) == first


def tokens_of_a_fresh_start(model: Path) -> dict[int, list[int]]:
    """Without drafts."""
    params = SamplingParams(max_tokens=GREEDY["max_tokens"], temperature=0.0, ignore_eos=True)
    with LLM(str(model), **{"threads": 1, **ON_DEVICE}, kv_blocks=256, block_size=4) as llm:
        (answer,) = llm.generate(GREEDY["prompt"], params)
    return {0: answer.outputs[0].token_ids}


def accepted_drafts(server: Server) -> tuple[float, float]:
    """Verified and accepted drafts so far."""
    numbers = server.wait_idle()
    return numbers["baton:draft_tokens_total"], numbers["baton:draft_tokens_accepted_total"]


def all_right(server: Server, expected: dict[int, list[int]]) -> bool:
    """Whether an answer has the expected tokens, and all its drafts are accepted."""
    before = accepted_drafts(server)
    assert tokens(server) == expected
    until(lambda: accepted_drafts(server)[0] > before[0], "the answer's drafts are counted")
    drafted, accepted = (now - then for now, then in zip(accepted_drafts(server), before, strict=True))
    return drafted == accepted


def test_a_draft_model_sleeps_and_drafts_for_other_weights(tiny: Path, tmp_path: Path):
    """Drafts of the same weights are right. Blocks come back from the host with the main model's KV only, so a draft model that
    believed in its own of a former life, or of other weights, would be wrong."""
    other, orders = make_model(tmp_path / "other", seed=8), {"all_drafts": True}
    of_other, of_tiny = tokens_of_a_fresh_start(other), tokens_of_a_fresh_start(tiny)
    settings = {"speculate": f"draft:{tiny}", "kv_host_gib": 0.01}
    with Server(tiny, tmp_path / "server", orders=orders, **settings).wait_ready() as server:
        assert all_right(server, of_tiny)
        engine, worker, plan = server.process("engine"), server.process("worker"), server.ask("/config").json["plan"]
        descriptors = engine.fds, server.process("cache").fds
        require_asleep(server)
        assert not worker.alive, "both models and both pools are gone with it"
        assert post(server, "/v1/wake")["mode"] == "serving"
        assert all_right(server, of_tiny)
        assert all_right(server, of_tiny), "with a prefix hit"
        assert (engine.fds, server.process("cache").fds) == descriptors
        assert server.ask("/config").json["plan"] == plan, "of both pools"
        post(server, "/v1/weights", {"path": str(other), "drain_seconds": 20})
        assert not all_right(server, of_other)
        assert not all_right(server, of_other)
        post(server, "/v1/weights", {"path": str(tiny), "drain_seconds": 20})
        assert all_right(server, of_tiny)
        assert all_right(server, of_tiny)
        assert server.wait_idle()["baton:worker_losses_total"] == 0


@pytest.mark.slow
def test_weights_with_another_vocabulary_than_the_draft_model_are_refused(tiny: Path, tmp_path: Path):
    other = make_model(tmp_path / "other", seed=8)
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    orders = {"all_drafts": True}
    with Server(tiny, tmp_path / "server", orders=orders, speculate=f"draft:{tiny}").wait_ready() as server:
        first = tokens(server)
        bad = server.ask("/v1/weights", {"path": str(other), "drain_seconds": 20})
        assert bad.status == 400
        assert "a draft model must have the main model's vocabulary" in bad.json["error"]["message"]
        assert all_right(server, first), "those that were served go on, with drafts"


def test_a_worker_killed_while_it_loads_other_weights_is_replaced_by_one_that_loads_them(tiny: Path, tmp_path: Path):
    """Found by an audit: the order was refused, with 400, as if something were wrong with the weights."""
    other = make_model(tmp_path / "other", seed=8)
    orders = {"gate": {"at": "loading", "folder": str(tmp_path)}}
    (tmp_path / "open").touch()
    with Server(tiny, tmp_path / "server", orders=orders).wait_ready() as server:
        first = tokens(server)
        for path in ("open", "reached"):
            (tmp_path / path).unlink()

        async def loaded() -> Reply:
            asked = asyncio.create_task(ask(server.port, "/v1/weights", {"path": str(other), "drain_seconds": 20}))
            await asyncio.to_thread(until, (tmp_path / "reached").exists, "the next worker is loading")
            server.process("worker").send(signal.SIGKILL)
            (tmp_path / "open").touch()
            return await asked

        reply = asyncio.run(loaded())
        assert reply.status == 200, reply.content
        assert tokens(server) != first
