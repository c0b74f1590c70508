"""/v1/embeddings, /api/embed and /api/embeddings, with clients unmodified and a scripted engine."""

from __future__ import annotations

import base64
from dataclasses import replace

import ollama
import openai
import pytest
from api_fakes import MODEL, Script, a_vector, eventually, serving

from baton.api.embeddings.shape import floats
from baton.protocol.request import Refused


@pytest.fixture
def sdk(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_one_and_several(server, sdk):
    answer = sdk.embeddings.create(model="smol", input="Hi there")
    request = server.engine.requests[0]
    assert answer.data[0].embedding == floats(a_vector(request))
    assert (request.sampling.pooling, request.sampling.max_tokens) == ("mean", 1)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(request.prompt)
    several = sdk.embeddings.create(
        model="smol", input=["a", "b c d e"], encoding_format="float", extra_body={"pooling": "last"}
    )
    assert [entry.index for entry in several.data] == [0, 1]
    assert [entry.embedding for entry in several.data] == [floats(a_vector(each)) for each in server.engine.requests[1:]]
    assert server.engine.requests[1].sampling.pooling == "last"


def test_the_model_says_how_to_pool_unless_the_request_does(text, http):
    with serving(text, model=replace(MODEL, pooling="last")) as server:
        for asked, expected in (
            ({}, "last"),
            ({"pooling": None}, "last"),
            ({"pooling": "cls"}, "cls"),
            ({"pooling": "mean"}, "mean"),
        ):
            assert http.post(server.url + "/v1/embeddings", json={"model": "smol", "input": "Hi", **asked}).status_code == 200
            assert server.engine.requests[-1].sampling.pooling == expected
        assert ollama.Client(host=server.url, timeout=20).embed("smol", "Hi").embeddings
        assert server.engine.requests[-1].sampling.pooling == "last"
        assert http.get(server.url + "/v1/models").json()["data"][0]["pooling"] == "last"


def test_a_pooling_that_is_not_there_is_never_replaced_silently(text, http):
    with serving(text, model=replace(MODEL, pooling="max_tokens")) as server:
        refused = http.post(server.url + "/v1/embeddings", json={"model": "smol", "input": "Hi"})
        assert refused.status_code == 400
        assert "the model's files want embeddings pooled by max_tokens" in refused.json()["error"]["message"]
        chosen = http.post(server.url + "/v1/embeddings", json={"model": "smol", "input": "Hi", "pooling": "mean"})
        assert chosen.status_code == 200


def test_token_ids_and_base64(server, http):
    body = {"model": "smol", "input": [[5, 6, 7], [8]], "encoding_format": "base64"}
    data = http.post(server.url + "/v1/embeddings", json=body).json()["data"]
    assert [request.prompt for request in server.engine.requests] == [(5, 6, 7), (8,)]
    assert [base64.b64decode(entry["embedding"]) for entry in data] == [a_vector(each) for each in server.engine.requests]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": None}, "input must be"),
        ({"input": ""}, "the input has no tokens"),
        ({"input": []}, "input is an empty list"),
        ({"input": [10**9]}, "input[0] must be a token id"),
        ({"input": "x " * 600}, "maximum context length is 512 tokens"),
        ({"encoding_format": "x"}, "encoding_format must be"),
        ({"pooling": "max"}, "pooling must be"),
        ({"pooling": ["mean"]}, "pooling must be"),
        ({"stream": True}, "stream is not supported"),
    ],
)
def test_refusals(server, http, fields, words):
    answer = http.post(server.url + "/v1/embeddings", json={"model": "smol", "input": "Hi", **fields})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_errors_and_ends(server, sdk):
    server.engine.script = Script(refuse=Refused("queue_full", 9, 3))
    with pytest.raises(openai.RateLimitError):
        sdk.embeddings.create(model="smol", input="Hi")
    server.engine.script = Script(end_error_after=0)
    with pytest.raises(openai.InternalServerError, match="NaN"):
        sdk.embeddings.create(model="smol", input="Hi")
    server.engine.script = Script(silent=True)
    with pytest.raises(openai.APITimeoutError):
        sdk.embeddings.create(model="smol", input="Hi", timeout=0.2)
    assert eventually(lambda: not server.engine.live, 2.0)


def test_ollama(server):
    client = ollama.Client(host=server.url, timeout=20)
    answer = client.embed("smol:latest", ["a", "b c"])
    assert [list(vector) for vector in answer.embeddings] == [floats(a_vector(each)) for each in server.engine.requests]
    assert answer.model == "smol:latest"
    assert answer.prompt_eval_count == sum(len(each.prompt) for each in server.engine.requests)
    assert list(client.embeddings("smol", "a").embedding) == floats(a_vector(server.engine.requests[0]))
    with pytest.raises(ollama.ResponseError, match="dimensions must be at most 3"):
        client.embed("smol", "a", dimensions=4)
    assert "embedding" in client.show("smol").capabilities
