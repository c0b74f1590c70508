"""`baton up`: a prefill and a decode instance behind a router answer as one `baton serve` does, and end without a trace."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chaos_cluster import Cluster
from chaos_model import make_model
from chaos_server import Reply, Server, until

from baton import __version__

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
CHAT = [{"role": "user", "content": "Say something about the weather of last week"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SHORT = {"model": "tiny", "max_tokens": 9, "temperature": 0}
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, n = 2": (
        "/v1/chat/completions",
        {**SHORT, "messages": CHAT, "n": 2, "temperature": 1.0, "seed": 4, "logprobs": True},
    ),
    "a required call": (
        "/v1/chat/completions",
        {**SHORT, "messages": CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 80},
    ),
    "a schema": (
        "/v1/chat/completions",
        {**SHORT, "messages": CHAT, "max_tokens": 60, "response_format": {"type": "json_object"}},
    ),
    "responses": ("/v1/responses", {"model": "tiny", "input": PROMPT, "max_output_tokens": 9, "temperature": 0}),
    "messages": ("/v1/messages", {**SHORT, "messages": CHAT}),
    "ollama": (
        "/api/chat",
        {"model": "tiny", "messages": CHAT, "stream": False, "options": {"num_predict": 9, "temperature": 0}},
    ),
    "embedding": ("/v1/embeddings", {"model": "tiny", "input": PROMPT}),
    "embeddings": ("/v1/embeddings", {"model": "tiny", "input": [PROMPT, "Hi", PROMPT * 3], "pooling": "last"}),
    "embeddings of ollama": ("/api/embed", {"model": "tiny", "input": [PROMPT, "Hi"]}),
    "how many tokens": ("/tokenize", {"model": "tiny", "prompt": PROMPT}),
}
OF_THE_CALL = ("id", "item_id", "created", "created_at", "completed_at", "system_fingerprint", "cached_tokens")
"""Fields that differ from call to call, or with what was asked before."""


def same_for_all(answer: Any) -> Any:
    if isinstance(answer, list):
        return [same_for_all(each) for each in answer]
    if not isinstance(answer, dict):
        return answer
    return {
        name: same_for_all(value)
        for name, value in answer.items()
        if name not in OF_THE_CALL and not name.endswith(("_duration", "_details"))
    }


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tiny, tmp_path_factory.mktemp("up"), prefill=1, decode=1) as cluster:
        yield cluster.wait_ready()


@pytest.fixture(scope="module")
def expected(alone: Server) -> dict[str, Any]:
    """What `baton serve` says to the same."""
    alone.ask("/v1/cache/clear", {})
    whole = {name: alone.ask("/v1/completions", body_of(request)).json for name, request in REQUESTS.items()}
    text = whole["greedy"]["choices"][0]["text"]
    stop = text[len(text) // 2 :][:1]
    stopped = alone.ask("/v1/completions", body_of({"max_tokens": 12, "stop": [stop]})).json
    dialects = {name: same_for_all(ok(alone.ask(*asked))) for name, asked in DIALECTS.items()}
    return {
        **{name: told(answer) for name, answer in whole.items()},
        "stop": stop,
        "stopped": told(stopped),
        "dialects": dialects,
        "usage of cached": usage_of_cached(alone),
    }


def ok(reply: Reply) -> Any:
    assert reply.status == 200, reply.content
    return reply.json


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


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_answers_as_one_server_does(cluster: Cluster, expected: dict[str, Any], name: str):
    assert same_for_all(ok(cluster.ask(*DIALECTS[name]))) == expected["dialects"][name]


def test_a_request_that_is_sent_again_is_generated_once(cluster: Cluster):
    body = body_of({"prompt": "Once and only once", "max_tokens": 7, "temperature": 1.0})
    before = cluster.view()["counters"]["requests"]
    first, again = (cluster.ask("/v1/completions", body, headers={"Idempotency-Key": "k-1"}) for _ in range(2))
    assert first.status == 200
    assert again.json == first.json
    assert cluster.view()["counters"]["requests"] == before + 1


def usage_of_cached(target: Cluster | Server) -> list[Any]:
    """Of a prompt that nobody has, of the same again, and of a longer one; each with two sequences too."""
    first = "Nobody has ever asked for this before, and then somebody did."
    asked = [body_of({"prompt": prompt, "max_tokens": 3, "n": n}) for prompt in (first, first, first * 2) for n in (1, 2)]
    return [ok(target.ask("/v1/completions", each))["usage"] for each in asked]


def test_cached_tokens_are_told_as_by_one_server(cluster: Cluster, expected: dict[str, Any]):
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in expected["usage of cached"]]
    assert [count > 0 for count in cached] == [False, True, True, True, True, True]
    assert usage_of_cached(cluster) == expected["usage of cached"]


def test_a_kept_response_goes_on(cluster: Cluster):
    first = ok(cluster.ask("/v1/responses", {"model": "tiny", "input": "Hello", "max_output_tokens": 5}))
    more = {"model": "tiny", "input": "And?", "max_output_tokens": 5, "previous_response_id": first["id"]}
    assert ok(cluster.ask("/v1/responses", more))["usage"]["input_tokens"] > first["usage"]["input_tokens"]


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


def test_a_cluster_tells_its_builds_its_lag_and_where_time_goes(cluster: Cluster):
    assert cluster.ask("/v1/completions", body_of(REQUESTS["greedy"])).status == 200

    def steps() -> float:  # instances send their numbers once per second
        return sum(value for key, value in cluster.metrics().items() if key.startswith("baton:step_tokens_count"))

    until(lambda: steps() > 0, "an instance has sent how many steps it computed")
    found = cluster.metrics()

    def of(name: str, *labels: str) -> float:
        return max(value for key, value in found.items() if key.startswith(name + "{") and all(each in key for each in labels))

    for instance in ("prefill-0", "decode-0"):
        assert of("baton:instance_info", f'instance="{instance}"', f'version="{__version__}"') > 1e9
        assert of("baton:engine_loop_lag_seconds", f'instance="{instance}"', 'process="engine"') >= 0.0
    assert of("baton:loop_lag_seconds", 'process="router"') >= 0.0
    for name in ("queue", "prefill", "decode", "inference"):
        assert of(f"vllm:request_{name}_time_seconds_count", "model_name") >= 1
        assert found[f"baton:request_{name}_seconds_count"] >= 1
    assert found["baton:request_prefill_seconds_sum"] > 0.0
    views = cluster.ask("/v1/cluster").json["instances"]
    assert {view["build"]["version"] for view in views} == {__version__}


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


@pytest.mark.slow
@pytest.mark.parametrize("after_seconds", [0.05, 0.4, 1.0, 2.0])
def test_a_router_killed_while_it_loads_other_weights_leaves_a_cluster_that_serves(
    tiny: Path, tmp_path: Path, after_seconds: float
):
    """Wherever it was: draining, stopping workers, or waiting for those with the new weights. The instances stayed paused."""
    other = make_model(tmp_path / "other", seed=8)
    with Cluster(tiny, tmp_path / "cluster", mixed=2) as cluster, ThreadPoolExecutor(1) as pool:
        cluster.wait_ready()
        loading = pool.submit(cluster.ask, "/v1/weights", {"path": str(other)})
        time.sleep(after_seconds)
        router = cluster.router()
        router.send(signal.SIGKILL)
        with contextlib.suppress(OSError, EOFError):
            loading.result()

        def serves() -> bool:
            try:
                return cluster.ask("/v1/completions", body_of(REQUESTS["greedy"])).status == 200
            except (OSError, EOFError):
                return False

        until(serves, "requests are answered again")


@pytest.mark.slow
def test_an_instance_killed_while_all_load_other_weights_comes_back_with_them(tiny: Path, tmp_path: Path):
    """It came back with the former ones, and was refused for as long as the cluster ran."""
    other = make_model(tmp_path / "other", seed=8)
    with Cluster(tiny, tmp_path / "cluster", mixed=2) as cluster, ThreadPoolExecutor(1) as pool:
        cluster.wait_ready()
        first = cluster.engine("mixed-0")
        loading = pool.submit(cluster.ask, "/v1/weights", {"path": str(other)})
        time.sleep(0.8)
        first.send(signal.SIGKILL)
        assert loading.result().status == 200

        def both() -> bool:
            identities = {one["name"]: one["kv_identity"] for one in cluster.view()["instances"]}
            return len(identities) == 2 and len(set(identities.values())) == 1

        until(both, "both have joined, with the same weights")


@pytest.mark.slow
def test_one_that_is_killed_takes_everybody_along(tiny: Path, tmp_path: Path):
    """Nobody is left that holds memory or a port. Its directory stays until another one begins."""
    with Cluster(tiny, tmp_path / "first", prefill=1, decode=1) as first:
        first.wait_ready()
        first.popen.kill()
        first.popen.wait(30)
        for process in first.seen.values():
            until(lambda process=process: not process.alive, f"process {process.pid} is gone", 30.0)
        for path in first.temporary.iterdir():
            shutil.rmtree(path)


def test_it_ends_in_order_and_leaves_nothing(cluster: Cluster):
    """The last one: SIGTERM drains. What must be gone is looked at by the rig, directories and sockets included."""
    assert cluster.stop() == 0
    assert "draining" in cluster.errors
    assert "Traceback" not in cluster.errors
    cluster.require_all_gone()
