"""Limits hold for products: fields that are each within their bounds, and large together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from api_fakes import CONTEXT, MODEL, eventually, serving

from baton.api.config import ApiConfig
from baton.api.limits import Limits

TEXT = "/v1/completions"


def refused(answer, param: str) -> str:
    assert answer.status_code == 400, (answer.status_code, answer.text[:300])
    error = answer.json()["error"]
    assert error["param"] == param, error
    return error["message"]


@pytest.mark.parametrize("word", ["0123456789" * 102, "\u06dd\u0f12\u1362" * 113], ids=["digits", "rare"])
@pytest.mark.parametrize("prompts", [1, 64])
def test_bad_words_are_bounded_together(server, http, word, prompts):
    """One request of 1 MB (1,024 words of 1,024 bytes, 64 prompts) ended the server."""
    body = {"prompt": ["x"] * prompts, "max_tokens": 1, "bad_words": [f"{word}{i}"[:1024] for i in range(1024)]}
    assert "at most 16384" in refused(http.post(server.url + TEXT, json=body), "bad_words")
    assert server.engine.requests == []


def test_tokens_of_bad_words_are_bounded_too(server, http):
    words = ["0123456789" * 12 + str(i) for i in range(130)]  # within the bytes
    assert "at most 4096" in refused(http.post(server.url + TEXT, json={"prompt": "x", "bad_words": words}), "bad_words")
    assert server.engine.requests == []


def test_settings_of_a_prompt_list_are_made_once(server, http):
    words = [f"word number {i}" for i in range(300)]
    bias = {str(i): 1.0 for i in range(1000)}
    body = {"prompt": ["a", "b c", "d e f"], "max_tokens": 2, "bad_words": words, "logit_bias": bias}
    assert http.post(server.url + TEXT, json=body).status_code == 200
    first, *others = [request.sampling for request in server.engine.requests]
    assert all(other.bad_words is first.bad_words and other.logit_bias is first.logit_bias for other in others)


def test_the_name_of_a_special_token_forbids_that_token(server, http, text):
    end = text.tokenizer.eos_ids[0]
    body = {"prompt": "x", "max_tokens": 1, "bad_words": [text.tokenizer.token_text(end)]}
    assert http.post(server.url + TEXT, json=body).status_code == 200
    assert (end,) in server.engine.requests[0].sampling.bad_words


def test_bad_words_need_no_second_tokenizer(server, http, text):
    """It was built on the loop, in a fifth of a second, by the first request that had any."""
    text.tokenizer._plain = None
    body = {"prompt": "x", "max_tokens": 1, "bad_words": ["bad", "worse"]}
    assert http.post(server.url + TEXT, json=body).status_code == 200
    assert text.tokenizer._plain is None


def test_prompts_are_bounded_together(text, http):
    limits = Limits(prompt_tokens=1000)
    with serving(text, ApiConfig(limits=limits)) as server:
        whole = [5] * (CONTEXT - 10)
        assert http.post(server.url + TEXT, json={"prompt": whole, "max_tokens": 1}).status_code == 200
        for prompts in ([whole] * 3, ["word " * 300] * 4):
            body = {"prompt": prompts, "max_tokens": 1}
            assert "more than 1000 tokens together" in refused(http.post(server.url + TEXT, json=body), "prompt")


def test_one_prompt_may_always_have_the_whole_context(text, http):
    with serving(text, ApiConfig(limits=Limits(prompt_tokens=10))) as server:
        answer = http.post(server.url + TEXT, json={"prompt": [5] * (CONTEXT - 1), "max_tokens": 1})
        assert answer.status_code == 200


def test_log_probabilities_of_prompts_are_bounded_together(text, http):
    with serving(text, ApiConfig(limits=Limits(prompt_logprob_entries=2100))) as server:
        body = {"prompt": [5] * 100, "max_tokens": 1, "prompt_logprobs": 20}
        assert http.post(server.url + TEXT, json=body).status_code == 200
        assert "2121" in refused(http.post(server.url + TEXT, json=body | {"prompt": [5] * 101}), "prompt_logprobs")
        body = {"prompt": [[5] * 60] * 2, "max_tokens": 1, "echo": True, "logprobs": 20}
        assert "2520" in refused(http.post(server.url + TEXT, json=body), "prompt_logprobs")


def test_log_probabilities_of_prompt_and_output_are_bounded_together(text, http):
    with serving(text, ApiConfig(limits=Limits(logprob_entries=130))) as server:
        body = {"prompt": [5] * 40, "max_tokens": 10, "prompt_logprobs": 1, "logprobs": 4}
        assert http.post(server.url + TEXT, json=body).status_code == 200
        assert "132 log-probabilities" in refused(http.post(server.url + TEXT, json=body | {"prompt": [5] * 41}), "logprobs")


def test_detokenize_takes_as_many_ids_as_the_context_has(server, http):
    url = server.url + "/detokenize"
    assert http.post(url, json={"tokens": [46778] * CONTEXT}).status_code == 200
    assert f"at most {CONTEXT}" in refused(http.post(url, json={"tokens": [46778] * (CONTEXT + 1)}), "tokens")


def test_tokenize_takes_a_bounded_text(server, http):
    url, limit = server.url + "/tokenize", Limits().tokenize_bytes
    assert http.post(url, json={"prompt": "word " * 1000}).json()["count"] > CONTEXT
    for prompt in ("x" * (limit + 1), "é" * (limit // 2 + 1)):
        refused(http.post(url, json={"prompt": prompt}), "prompt")


@pytest.mark.parametrize("route", ["/tokenize", "/detokenize"])
def test_tokenize_and_detokenize_are_admitted_like_generation(text, http, route):
    with serving(text, ApiConfig(limits=Limits(streams=1))) as server:
        front = server.app.state.front
        body = {"prompt": "x"} if route == "/tokenize" else {"tokens": [5]}
        with front.live.admitted(b"", ()):
            answer = http.post(server.url + route, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_streams")
            assert "retry-after" in answer.headers
        assert http.post(server.url + route, json=body).status_code == 200
        assert eventually(lambda: len(front.live) == 0)


def test_a_chat_too_long_for_any_tokens_is_refused_before_it_is_rendered(text, http, monkeypatch):
    rendered = []
    with serving(text, model=replace(MODEL, context_tokens=16)) as server:
        front = server.app.state.front
        monkeypatch.setattr(front, "template", type("Template", (), {"render": lambda *_, **__: rendered.append(1)})())
        for content in ("x" * 100_000, [{"type": "text", "text": "x" * 100_000}]):
            body = {"messages": [{"role": "user", "content": content}]}
            refused(http.post(server.url + "/v1/chat/completions", json=body), "prompt")
    assert rendered == []
