"""Core and runner together give the greedy tokens of transformers, for every architecture, in chunks of any size."""

from __future__ import annotations

import pytest
from rig import Rig, generate
from tiny_models import CASES, PROMPTS, oracle_greedy, oracle_model

from baton.models.load import load_model

OUTPUT_TOKENS = 8
EVERY_PROMPT = {f"p{i}": prompt for i, prompt in enumerate(PROMPTS)}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A model of ours and what transformers says to the prompts."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = oracle_model(request.param)
    oracle.save_pretrained(folder)
    return load_model(folder), {(name, 0): oracle_greedy(oracle, p, OUTPUT_TOKENS) for name, p in EVERY_PROMPT.items()}


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_every_architecture(case, chunk):
    model, expected = case
    assert generate(model, EVERY_PROMPT, max_tokens=OUTPUT_TOKENS, rig={"chunk": chunk, "block_size": 4}) == expected


def test_without_a_compiler(case):
    model, expected = case
    rig = Rig(model, native=False, block_size=16)
    assert rig.runner.forward.attention.name == "gathered"
    for name, prompt in EVERY_PROMPT.items():
        rig.submit(name, prompt, max_tokens=OUTPUT_TOKENS)
    assert rig.run() == expected
