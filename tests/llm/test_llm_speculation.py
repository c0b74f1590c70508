"""LLM with `speculate`: the same answers, in fewer steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from chaos_model import make_model

from baton.llm import LLM, SamplingParams

SETTINGS: dict[str, Any] = {"threads": 1, "device": "cpu", "kv_blocks": 256, "block_size": 16}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


def drawn(rng: random.Random) -> SamplingParams:
    some: dict[str, Any] = {"stop": ["".join(rng.choices("abcdefgh", k=2))]} if rng.random() < 0.4 else {}
    if rng.random() < 0.5:
        some |= {"temperature": rng.choice((0.4, 1.0)), "seed": rng.randrange(2**40), "top_p": 0.9}
    return SamplingParams(**{"temperature": 0.0, "max_tokens": rng.randint(8, 60), "logprobs": rng.choice((None, 2)), **some})


def test_answers_are_the_same_with_and_without(tiny):
    rng = random.Random(5)
    prompts = ["".join(rng.choices("abcdefgh ", k=rng.randint(4, 20))) * rng.choice((1, 3)) for _ in range(12)]
    params = [drawn(rng) for _ in prompts]
    with LLM(str(tiny), **SETTINGS) as plain, LLM(str(tiny), speculate="ngram", **SETTINGS) as drafting:
        expected, answers = plain.generate(prompts, params, n=2), drafting.generate(prompts, params, n=2)
        stats = drafting.instance.stats
    for one, other in zip(expected, answers, strict=True):
        for left, right in zip(one.outputs, other.outputs, strict=True):
            assert (left.text, left.token_ids, left.finish_reason) == (right.text, right.token_ids, right.finish_reason)
            if plain._runner.executor.name != "torch":
                assert left.logprobs == right.logprobs
    assert stats.drafts, "the tiny model repeats itself: there is something to draft"
