"""Core and runner together give the greedy tokens of transformers, for every architecture, in chunks of any size."""

from __future__ import annotations

import pytest
from rig import generate, load_path
from tiny_models import CASES, PROMPTS, oracle_greedy, oracle_model

from baton.errors import ModelUnsupported

OUTPUT_TOKENS = 8
EVERY_PROMPT = {f"p{i}": prompt for i, prompt in enumerate(PROMPTS)}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A model's folder, and what transformers says to the prompts."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = oracle_model(request.param)
    oracle.save_pretrained(folder)
    return folder, {(name, 0): oracle_greedy(oracle, p, OUTPUT_TOKENS) for name, p in EVERY_PROMPT.items()}


def test_what_the_c_kernels_lack_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("baton.worker.platforms.cpu.native_lacks", lambda model: ["attention sinks"])
    oracle_model("gpt-oss").save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match="attention sinks"):
        load_path(tmp_path, compute="native")


@pytest.mark.parametrize("chunk", [1, pytest.param(7, marks=pytest.mark.slow), 64])
def test_every_architecture(case, chunk):
    folder, expected = case
    model = load_path(folder, compute="native")
    assert generate(model, EVERY_PROMPT, max_tokens=OUTPUT_TOKENS, rig={"chunk": chunk, "block_size": 4}) == expected


def test_without_a_compiler(case):
    folder, expected = case
    model = load_path(folder, compute="torch")
    assert generate(model, EVERY_PROMPT, max_tokens=OUTPUT_TOKENS, rig={"block_size": 16}) == expected
