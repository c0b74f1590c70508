"""Ollama's own client against a real server: what it returns, and what its errors say."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import ollama
import pytest
from api_fakes import CONTEXT, Script, eventually, says, serving

from baton.api.config import ApiConfig
from baton.errors import Unavailable
from baton.protocol.request import Refused

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(server):
    return ollama.Client(host=server.url, timeout=20)


def test_chat(server, client, text):
    server.engine.script = Script(reply=says(text, "Hello you"))
    answer = client.chat("smol:latest", HI, options={"num_predict": 7, "top_k": 5, "seed": 3, "num_ctx": 8})
    assert answer.message.content == "Hello you"
    assert (answer.done, answer.done_reason, answer.model) == (True, "stop", "smol:latest")
    assert answer.eval_count == 3
    assert answer.prompt_eval_count == len(server.engine.requests[0].prompt)
    assert answer.total_duration == answer.prompt_eval_duration + answer.eval_duration > 0
    sampling = server.engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (7, 5, 3)
    for endless in (-1, -2):
        client.chat("smol", HI, options={"num_predict": endless})
        request = server.engine.requests[-1]
        assert request.sampling.max_tokens == CONTEXT - len(request.prompt)


def test_chat_stream(server, client, text):
    server.engine.script = Script(reply=says(text, "Hello you\u2028there \u00e9"))
    parts = list(client.chat("smol", HI, stream=True))
    assert "".join(part.message.content for part in parts) == "Hello you\u2028there \u00e9"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason == "stop"


def test_a_stream_is_what_a_body_without_the_field_gets(server, http, text):
    server.engine.script = Script(reply=says(text, "a b"))
    answer = http.post(server.url + "/api/chat", json={"model": "smol", "messages": HI})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["done"] for line in answer.text.splitlines()][-1] is True


def test_generate_is_a_chat_and_raw_is_not(server, client, text):
    server.engine.script = Script(reply=says(text, "fine"))
    assert client.generate("smol", "How are you?", system="Be short.").response == "fine"
    prompt = text.tokenizer.decode(server.engine.requests[0].prompt, skip_special_tokens=False)
    assert "<|im_start|>system\nBe short.<|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
    assert client.generate("smol", "How are you?", raw=True).response == "fine"
    raw = server.engine.requests[1]
    assert raw.prompt == tuple(text.tokenizer.encode("How are you?"))
    assert raw.sampling.max_tokens == CONTEXT - len(raw.prompt), "Ollama's has no bound of its own"
    assert "".join(part.response for part in client.generate("smol", "x", stream=True)) == "fine"


def test_an_empty_prompt_only_asks_whether_the_model_is_there(server, client):
    assert client.generate("smol").done_reason == "load"
    assert client.chat("smol", []).done_reason == "load"
    assert not server.engine.requests
    with pytest.raises(ollama.ResponseError, match="there is no model 'other' here"):
        client.generate("other")


@pytest.mark.parametrize("parser", ["auto", "none"])
def test_a_model_says_whether_it_can_call_tools(text, parser):
    with serving(text, ApiConfig(tool_call_parser=parser)) as server:
        capabilities = ollama.Client(host=server.url, timeout=20).show("smol").capabilities
        assert ("tools" in capabilities) is (parser == "auto")


def test_models(server, client):
    assert [model.model for model in client.list().models] == ["smol", "gpt-3.5-turbo"]
    front = server.app.state.front
    known = dataclasses.replace(front.model, weights="aa", weights_bytes=145_000_000)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(front, "model", known)
        [listed, _] = client.list().models
    assert listed.size == 145_000_000
    assert listed.digest == hashlib.sha256(b"aa").hexdigest()
    assert client.show("smol:latest").modelinfo["baton.context_length"] == 512
    assert "completion" in client.show("smol").capabilities
    assert client.ps().models[0].context_length == 512
    with pytest.raises(ollama.ResponseError, match="there is no model 'x' here") as raised:
        client.show("x")
    assert raised.value.status_code == 404


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"options": {"temperature": 9}}, "options.temperature must be"),
        ({"options": {"num_predict": 0}}, "options.num_predict must be"),
        ({"options": {"repeat_penalty": -1}}, "options.repeat_penalty must be"),
        ({"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ({"options": 3}, "options must be an object"),
        ({"template": "{{ x }}"}, "template is not supported"),
        ({"messages": 3}, "messages must be a list"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images is not supported"),
        ({"think": 3}, "think "),
        ({"format": 3}, "format must be"),
        ({"n": 2}, "n is not supported"),
        ({"stream": 3}, "stream must be"),
    ],
)
def test_refusals_name_the_clients_field(server, http, fields, words):
    answer = http.post(server.url + "/api/chat", json={"model": "smol", "messages": HI, **fields})
    assert answer.status_code == 400
    assert set(answer.json()) == {"error"}
    assert words in answer.json()["error"]


def test_unknown_fields_are_told(server, http, text):
    server.engine.script = Script(reply=says(text, "a"))
    body = {"model": "smol", "messages": HI, "zzz": 1, "options": {"yyy": 2}, "stream": False}
    assert http.post(server.url + "/api/chat", json=body).headers["x-baton-ignored"] == "zzz, options.yyy"


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        (Script(refuse=Refused("queue_full", 9, 3)), 429, "queue"),
        (Script(end_error_after=1), 500, "NaN"),
        (Script(fail_after=1), 500, "an internal error"),
    ],
)
def test_errors(server, client, script, status, words):
    server.engine.script = script
    with pytest.raises(ollama.ResponseError, match=words) as raised:
        client.chat("smol", HI, options={"num_predict": 5})
    assert raised.value.status_code == status


def test_an_error_inside_a_stream_is_raised(server, client, text):
    server.engine.script = Script(reply=says(text, "a b c d"), fail_after=2, error=Unavailable("the engine was lost"))
    with pytest.raises(ollama.ResponseError, match="the engine was lost"):
        list(client.chat("smol", HI, stream=True))


def test_a_slow_stream_is_kept_alive_in_a_way_that_clients_parse(text):
    config = ApiConfig(keep_alive_seconds=0.05)
    with serving(text, config) as server:
        server.engine.script = Script(reply=says(text, "a b"), delay_seconds=0.3)
        parts = list(ollama.Client(host=server.url).chat("smol", HI, stream=True))
    assert "".join(part.message.content for part in parts) == "a b"


def test_leaving_aborts_and_retries_are_answered_once(server, client, http, text):
    server.engine.script = Script(delay_seconds=0.01)
    stream = client.generate("smol", "x", stream=True)
    next(stream)
    stream.close()
    assert eventually(lambda: not server.engine.live, 1.0)
    server.engine.script = Script(reply=says(text, "once"))
    server.engine.requests.clear()
    sent = [
        http.post(server.url + "/api/chat", json={"model": "smol", "messages": HI}, headers={"idempotency-key": "ollama-1"})
        for _ in range(2)
    ]
    assert sent[0].content == sent[1].content
    assert sent[1].headers["content-type"] == "application/x-ndjson"
    assert len(server.engine.requests) == 1


def test_a_wrong_key_is_refused_in_ollamas_words(text):
    with serving(text, ApiConfig(api_keys=("right",))) as server:
        with pytest.raises(ollama.ResponseError, match="give an API key") as raised:
            ollama.Client(host=server.url).list()
        assert raised.value.status_code == 401
        assert ollama.Client(host=server.url, headers={"Authorization": "Bearer right"}).list().models
