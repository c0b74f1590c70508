"""Routes of a server whose model is an encoder, with a scripted engine and a WordPiece tokenizer."""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from api_fakes import MODEL, Script, a_vector, serving

from baton.text.loading import load_model_text

sys.path.append(str(Path(__file__).parents[2] / "models"))
tiny_encoders = pytest.importorskip("tiny_encoders", reason="the tokenizers of encoders stand beside models of transformers")

POSITIONS = 64
ENCODER = replace(MODEL, generates=False, context_tokens=POSITIONS + 1, head_width=97, pooling="cls")
LONG = "the baton is a short stick " * 2000


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    tiny_encoders.word_piece().save(str(folder / "tokenizer.json"))
    return load_model_text(folder)


@pytest.fixture(scope="module")
def servers(words):
    with (
        serving(words, model=replace(ENCODER, scoring="vectors")) as embedder,
        serving(words, model=replace(ENCODER, scoring="sigmoid", labels=("LABEL_0",))) as reranker,
        serving(words, model=replace(ENCODER, scoring="logit", labels=("LABEL_0",))) as plain,
        serving(words, model=replace(ENCODER, scoring="softmax", labels=("bad", "good", "other"))) as classifier,
    ):
        yield {"embedder": embedder, "reranker": reranker, "plain": plain, "classifier": classifier}


@pytest.fixture(autouse=True)
def fresh(servers):
    for server in servers.values():
        server.engine.requests.clear()
        server.engine.script = Script()


def post(http, server, path, **body):
    return http.post(server.url + path, json={"model": "smol", **body})


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}]}),
        ("/api/generate", {"prompt": "x"}),
    ],
)
@pytest.mark.parametrize("kind", ["embedder", "reranker"])
def test_routes_that_generate_say_why_not(http, servers, kind, path, fields):
    answer = post(http, servers[kind], path, **fields)
    assert answer.status_code == 400
    assert "generates no text" in answer.text
    assert ("/v1/embeddings" if kind == "embedder" else "/rerank") in answer.text
    assert not servers[kind].engine.requests


def test_what_a_model_can_be_asked_for(http, servers, server):
    def facts(each):
        (model, *_) = http.get(each.url + "/v1/models").json()["data"]
        return model["tasks"], model["max_model_len"]

    assert facts(servers["embedder"]) == (["embed", "score"], POSITIONS)
    assert facts(servers["reranker"]) == (["score", "classify"], POSITIONS)
    assert facts(servers["classifier"]) == (["classify"], POSITIONS)
    assert facts(server)[0] == ["generate", "embed"]
    assert post(http, servers["embedder"], "/api/show").json()["capabilities"] == ["embedding"]
    assert post(http, servers["reranker"], "/api/show").json()["capabilities"] == []


def test_texts_get_the_tokens_around_them(http, servers, words):
    answer = post(http, servers["embedder"], "/v1/embeddings", input=["The runner passes", "a stick"]).json()
    requests = servers["embedder"].engine.requests
    encode = words.tokenizer.encode
    assert [list(request.prompt) for request in requests] == [encode("The runner passes"), encode("a stick")]
    assert {request.sampling.pooling for request in requests} == {"cls"}
    assert [each["embedding"] for each in answer["data"]] == [list(struct.unpack("<3f", a_vector(r))) for r in requests]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/api/embed"])
def test_inputs_that_are_too_long_are_cut(http, servers, path):
    embedder = servers["embedder"]
    assert post(http, embedder, path, input=LONG).status_code == 200
    prompt = embedder.engine.requests[-1].prompt
    assert (len(prompt), prompt[0], prompt[-1]) == (POSITIONS, 2, 3)
    assert post(http, embedder, path, input=LONG, truncate_prompt_tokens=10).status_code == 200
    prompt = embedder.engine.requests[-1].prompt
    assert (len(prompt), prompt[0], prompt[-1]) == (10, 2, 3)


def test_a_client_can_ask_not_to_cut(http, servers):
    answer = post(http, servers["embedder"], "/v1/embeddings", input="the baton " * 40, truncate_prompt_tokens=None)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert post(http, servers["embedder"], "/api/embed", input="the baton " * 40, truncate=False).status_code == 400


def test_a_model_with_classes_gives_no_vectors(http, servers):
    answer = post(http, servers["reranker"], "/v1/embeddings", input="x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
    assert "gives no vectors" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["reranker", "plain"])
def test_a_cross_encoder_reads_both_texts_at_once(http, servers, words, kind):
    server, documents = servers[kind], ["a stick", "the next runner", LONG]
    answer = post(http, server, "/rerank", query="the baton", documents=documents).json()
    requests = server.engine.requests
    assert [list(each.prompt) for each in requests] == [
        words.tokenizer.encode_pair("the baton", document, POSITIONS) for document in documents
    ]
    assert len(requests[2].prompt) == POSITIONS
    assert {(each.sampling.pooling, each.sampling.label_ids) for each in requests} == {("cls", (0,))}
    logits = [struct.unpack("<f", a_vector(each))[0] for each in requests]
    expected = [1 / (1 + math.exp(-logit)) for logit in logits] if kind == "reranker" else logits
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert [found[place] for place in range(3)] == pytest.approx(expected)


def test_limits_of_a_pair(http, servers, words):
    reranker = servers["reranker"]
    assert post(http, reranker, "/rerank", query="the", documents=[LONG], max_tokens_per_doc=4).status_code == 200
    assert len(reranker.engine.requests[-1].prompt) == 1 + 4 + 3
    assert post(http, reranker, "/score", text_1=LONG, text_2=LONG, truncate_prompt_tokens=21).status_code == 200
    assert len(reranker.engine.requests[-1].prompt) == 21
    answer = post(http, reranker, "/score", text_1="x", text_2="y", truncate_prompt_tokens=4)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    assert post(http, reranker, "/rerank", query="x", documents=["y"], instruction="z").status_code == 400


def test_several_classes_score_no_pairs(http, servers):
    answer = post(http, servers["classifier"], "/rerank", query="x", documents=["y"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")


def test_classify(http, servers):
    server = servers["classifier"]
    answer = post(http, server, "/classify", input=["the baton", LONG]).json()
    for request, row in zip(server.engine.requests, answer["data"], strict=True):
        shares = [math.exp(logit) for logit in struct.unpack("<3f", a_vector(request))]
        assert row["probs"] == pytest.approx([share / sum(shares) for share in shares])
        assert row["label"] == ("bad", "good", "other")[row["probs"].index(max(row["probs"]))]
        assert row["num_classes"] == 3
        assert request.sampling.label_ids == (0, 1, 2)
    assert answer["id"].startswith("classify-")
    refused = post(http, servers["embedder"], "/classify", input="x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")


def test_a_separator_in_a_text_to_classify_is_plain_characters(http, servers):
    post(http, servers["classifier"], "/classify", input="the [SEP] baton")
    assert servers["classifier"].engine.requests[-1].prompt.count(3) == 1


def test_an_embedding_encoder_scores_by_the_cosine(http, servers):
    answer = post(http, servers["embedder"], "/score", text_1="a stick", text_2=["the baton", LONG]).json()
    vectors = [struct.unpack("<3f", a_vector(request)) for request in servers["embedder"].engine.requests]

    def cosine(one, other):
        return sum(x * y for x, y in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))

    assert [each["score"] for each in answer["data"]] == pytest.approx([cosine(vectors[0], other) for other in vectors[1:]])
