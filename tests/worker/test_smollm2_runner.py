"""The real default model through core and runner, unquantised, against transformers on the same weights."""

from __future__ import annotations

import pytest
import torch
from rig import Rig, generate, load_path
from test_smollm2 import _prompts, loaded, oracle  # noqa: F401  fixtures of the model tests

OUTPUT_TOKENS = 8
pytestmark = pytest.mark.slow
"""Loading and running the oracle takes half a minute. make test has its two halves: the runner against transformers on small
models (test_greedy_equals_transformers.py), and this model against transformers without the runner (test_smollm2.py)."""


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load_path(smollm2_path)


@pytest.fixture(scope="module")
def expected(loaded, oracle):  # noqa: F811
    answers = {}
    for i, prompt in enumerate(_prompts(loaded)):
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": OUTPUT_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        output = oracle.generate(ids, attention_mask=torch.ones_like(ids), **options)
        answers[f"p{i}", 0] = output[0, len(prompt) :].tolist()
    return answers


@pytest.mark.parametrize(
    "rig", [{"chunk": 7}, {"block_size": 16}, {"blocks": 10, "chunk": 3}], ids=["chunks", "whole", "preempted"]
)
def test_greedy_tokens_equal_transformers(model, loaded, expected, rig):  # noqa: F811
    requests = {f"p{i}": prompt for i, prompt in enumerate(_prompts(loaded))}
    assert generate(model, requests, max_tokens=OUTPUT_TOKENS, rig=rig) == expected


def test_logprobs_equal_transformers(model, loaded, oracle, expected):  # noqa: F811
    prompt = _prompts(loaded)[3]
    rig = Rig(model, chunk=5)
    rig.submit("a", prompt, max_tokens=4, logprobs=5, prompt_logprobs=5)
    tokens = prompt + rig.run()["a", 0]
    with torch.no_grad():
        truth = oracle(torch.tensor([tokens])).logits[0].log_softmax(-1)
    words = [word for row in rig.logprobs["a", 0] for word in (*row.prompt, row.sampled) if word is not None]
    assert [word.token for word in words] == tokens[1:]
    for row, word in zip(truth, words, strict=False):
        assert word.logprob == pytest.approx(float(row[word.token]), abs=1e-3)
        assert [value for _, value in word.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)
