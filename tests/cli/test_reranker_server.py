"""Reranking with a decoder of Qwen3-Reranker's kind and filling in the middle, through a real server with real weights."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import openai
import pytest
from command_rig import serving
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

sys.path.append(str(Path(__file__).parent.parent / "models"))
tiny_models = pytest.importorskip("tiny_models", reason="the oracle is transformers (pip install 'baton-serve[oracle]')")

QUERY, DOCUMENTS = "What is a baton?", ["A stick.", "Nothing at all.", "A short stick that runners pass on."]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def byte_tokenizer() -> Tokenizer:
    """A token per byte, and those of the two answers."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: place for place, piece in enumerate([*letters, "ye", "yes", "no"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("y", "e"), ("ye", "s"), ("n", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKS))
    return tokenizer


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """A folder, its oracle and its tokenizer. The name says what it is."""
    folder = tmp_path_factory.mktemp("models") / "tiny-reranker"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models.CASES, "reranker", ("Qwen3", {"vocab_size": 270, "max_position_embeddings": 1024}))
        oracle = tiny_models.oracle_model("reranker")
    oracle.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder, oracle, tokenizer


@pytest.fixture(scope="module")
def server(reranker):
    with serving(reranker[0], "--served-model-name", "tiny", "--quantization", "none", "--kv-cache-dtype", "float32") as server:
        yield server


def share_of_yes(oracle, tokenizer: Tokenizer, query: str, document: str) -> float:
    """As the model card computes it: the prompt in one piece, a softmax over two logits."""
    text = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: {INSTRUCTION}\n<Query>: {query}\n"
        f"<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    logits = tiny_models.oracle_logits(oracle, tokenizer.encode(text).ids)[-1]
    yes, no = (math.exp(float(logits[tokenizer.token_to_id(word)])) for word in ("yes", "no"))
    return yes / (yes + no)


def test_a_decoder_reranks(server, reranker):
    _, oracle, tokenizer = reranker
    expected = [share_of_yes(oracle, tokenizer, QUERY, document) for document in DOCUMENTS]
    answer = server.post("/v1/rerank", {"model": "tiny", "query": QUERY, "documents": DOCUMENTS})
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert [found[place] for place in range(3)] == pytest.approx(expected, abs=1e-4)
    assert [each["index"] for each in answer["results"]] == sorted(range(3), key=lambda place: -expected[place])


def test_a_decoder_fills_in_the_middle(server, reranker):
    _, oracle, tokenizer = reranker
    before, after = "def f(x):\n    return ", "\n\nprint(f(2))\n"
    marks = {name: tokenizer.token_to_id(f"<|fim_{name}|>") for name in ("prefix", "suffix", "middle")}
    encode = tokenizer.encode
    prompt = [marks["prefix"], *encode(before).ids, marks["suffix"], *encode(after).ids, marks["middle"]]
    expected = tiny_models.oracle_greedy(oracle, prompt, 12)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)
    fields = {"temperature": 0, "max_tokens": 12, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    answer = client.completions.create(model="tiny", prompt=before, suffix=after, **fields)
    assert answer.choices[0].model_dump()["token_ids"] == expected
    whole = {"input_prefix": before, "input_suffix": after, "n_predict": 12, "temperature": 0, "ignore_eos": True}
    assert server.post("/infill", whole)["content"] == answer.choices[0].text
