"""`baton up`: a prefill and a decode instance behind a router answer as one `baton serve` does, and end without a trace."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_cluster import Cluster
from chaos_server import Server, until

PROMPT = "The quick brown fox jumps over the lazy dog, and then again over another one."
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 12},
    "drawn": {"max_tokens": 12, "temperature": 1.0, "seed": 5},
    "two sequences": {"max_tokens": 9, "n": 2, "temperature": 0.9, "seed": 11},
    "log-probabilities": {"max_tokens": 6, "logprobs": 2},
    "of the prompt": {"max_tokens": 4, "logprobs": 1, "echo": True},
    "prompt only": {"max_tokens": 0, "logprobs": 1, "echo": True},
    "prompt logprobs": {"max_tokens": 4, "prompt_logprobs": 2},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "penalties": {"max_tokens": 12, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "minimum": {"max_tokens": 6, "min_tokens": 5, "ignore_eos": False},
    "token ids": {"prompt": list(range(40, 90)), "max_tokens": 8},
    "schema": {
        "max_tokens": 60,
        "ignore_eos": False,
        "guided_json": {"type": "array", "items": {"enum": [1, "two"]}, "minItems": 2},
    },
    "regex, drawn": {"max_tokens": 40, "n": 2, "temperature": 1.0, "seed": 7, "guided_regex": "(ab|cd){3,9}[0-9]{4}"},
    "choice": {"max_tokens": 9, "guided_choice": ["red", "green", "blue"]},
    "several prompts": {"prompt": [PROMPT, PROMPT[::-1]], "max_tokens": 5},
}


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tiny, tmp_path_factory.mktemp("up"), prefill=1, decode=1) as cluster:
        yield cluster.wait_ready()


@pytest.fixture(scope="module")
def expected(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `baton serve` says to the same."""
    with Server(tiny, tmp_path_factory.mktemp("alone")).wait_ready() as server:
        whole = {name: server.ask("/v1/completions", body_of(request)).json for name, request in REQUESTS.items()}
        text = whole["greedy"]["choices"][0]["text"]
        stop = text[len(text) // 2 :][:1]
        stopped = server.ask("/v1/completions", body_of({"max_tokens": 12, "stop": [stop]})).json
        return {**{name: told(answer) for name, answer in whole.items()}, "stop": stop, "stopped": told(stopped)}


def body_of(request: dict[str, Any]) -> dict[str, Any]:
    usual = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**usual, **request}


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """All that does not differ from call to call. What is cached depends on what was asked before."""
    assert "choices" in answer, answer
    usage = {name: count for name, count in answer["usage"].items() if name.endswith("_tokens")}
    return {"choices": answer["choices"], "usage": usage}


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_that_of_one_server(cluster: Cluster, expected: dict[str, Any], name: str):
    assert told(cluster.ask("/v1/completions", body_of(REQUESTS[name])).json) == expected[name]


@pytest.mark.parametrize("name", ["greedy", "drawn", "two sequences", "one token"])
def test_a_stream_has_the_same_tokens(cluster: Cluster, expected: dict[str, Any], name: str):
    reply = cluster.ask("/v1/completions", body_of({**REQUESTS[name], "stream": True}))
    assert reply.complete
    assert reply.tokens == {choice["index"]: choice["token_ids"] for choice in expected[name]["choices"]}


def test_a_stop_string_ends_it_on_either_side_of_the_hand_off(cluster: Cluster, expected: dict[str, Any]):
    answer = cluster.ask("/v1/completions", body_of({"max_tokens": 12, "stop": [expected["stop"]]})).json
    assert told(answer) == expected["stopped"]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_chat_is_answered(cluster: Cluster):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0}
    assert cluster.ask("/v1/chat/completions", body).json["usage"]["completion_tokens"] >= 1


def test_prompts_are_handed_over_and_it_is_counted(cluster: Cluster):
    before = cluster.view()["counters"]["handoffs"]
    for word in ("something", "anything", "nothing"):  # on a slow machine an instance may be suspect just now
        cluster.ask("/v1/completions", body_of({"prompt": f"{word} that nobody has asked before " * 3, "max_tokens": 4}))
        view = cluster.wait_idle()
        if view["counters"]["handoffs"] > before:
            break
    assert view["counters"]["handoffs"] > before
    assert {(one["name"], one["role"]) for one in view["instances"]} == {("prefill-0", "prefill"), ("decode-0", "decode")}
    numbers = cluster.metrics()
    assert numbers["baton:router_handoffs_total"] == view["counters"]["handoffs"]
    assert numbers["baton:router_handoff_seconds_count"] > 0
    assert numbers['baton:kv_blocks{instance="decode-0",role="decode",state="held"}'] == 0


def test_health_and_orders_reach_the_instances(cluster: Cluster):
    assert cluster.ask("/ready").status == 200
    assert cluster.ask("/v1/cache/clear", {}).status == 200
    assert cluster.ask("/v1/pause", {"drain_seconds": 5}).json == {"mode": "paused"}
    refused = cluster.ask("/v1/completions", body_of({}))
    assert refused.status == 503
    assert refused.json["error"]["code"] == "paused"
    assert cluster.ask("/v1/resume", {}).json == {"mode": "serving"}
    assert cluster.ask("/v1/completions", body_of({"max_tokens": 3})).status == 200


def test_a_killed_instance_is_started_again_while_the_rest_serves(cluster: Cluster, expected: dict[str, Any]):
    first = cluster.engine("prefill-0")
    first.send(signal.SIGKILL)
    answer = cluster.ask("/v1/completions", body_of(REQUESTS["drawn"]))  # decode computes the prompt itself
    assert told(answer.json) == expected["drawn"]
    until(lambda: cluster.engine("prefill-0").pid != first.pid, "another prefill instance has joined")
    assert "prefill-0 process was killed by SIGKILL: starting another" in cluster.errors
    assert told(cluster.ask("/v1/completions", body_of(REQUESTS["greedy"])).json) == expected["greedy"]


def test_a_killed_router_is_started_again_and_instances_find_it(cluster: Cluster, expected: dict[str, Any]):
    def ready() -> bool:
        try:
            return cluster.ask("/ready").status == 200
        except (OSError, EOFError):
            return False

    cluster.router().send(signal.SIGKILL)
    until(lambda: "router process was killed by SIGKILL: starting another" in cluster.errors, "the loss is noticed")
    until(ready, "another router is ready")
    for name in ("prefill-0", "decode-0"):
        cluster.engine(name)
    assert told(cluster.ask("/v1/completions", body_of(REQUESTS["two sequences"])).json) == expected["two sequences"]


def test_it_ends_in_order_and_leaves_nothing(cluster: Cluster):
    """The last one: SIGTERM drains. What must be gone is looked at by the rig, directories and sockets included."""
    assert cluster.stop() == 0
    assert "draining" in cluster.errors
    assert "Traceback" not in cluster.errors
    cluster.require_all_gone()
