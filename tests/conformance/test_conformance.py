"""One contract for everything that computes: the same cases on every platform, against plain torch (platforms.py), in float32.

The real core and the real runner; requests come together, and the oracle answers them one by one. Chunks, preemptions, folded
blocks, lost workers and steps that are launched ahead must change nothing.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from platforms import END, POISON, TOKENS, Platform

from baton.core.events import EvictSome, PreemptSome
from baton.protocol.grammar import Grammar
from baton.protocol.request import FinishReason
from baton.protocol.thinking import Thinking

REGEX = "(ab|c)+d{2,9}[0-9]{3}"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
GRAMMARS = {
    "p0": Grammar("regex", REGEX, ends=(END,)),
    "p1": Grammar("json_schema", json.dumps(SCHEMA), ends=(END,)),
    "p2": Grammar("choice", '["red", "green", "blue"]', ends=(END,)),
}
"""Who is asked for what. The others have none, and must not notice."""


def fits(name: str, text: str) -> bool:
    match name:
        case "p0":
            return re.fullmatch(REGEX, text) is not None
        case "p1":
            return 0 <= json.loads(text)["n"] <= 99
    return text in ("red", "green", "blue")


# Greedy tokens, whatever happens on the way


@pytest.mark.parametrize("chunk", [5, None])
def test_greedy_tokens_in_any_chunks(platform: Platform, chunk):
    requests = platform.prompts(2 if platform.name == "interpreted" else 8, seed=0)
    assert platform.run(requests, {"chunk": chunk}).tokens == platform.oracle(requests).tokens


def test_preempted_sequences_go_on_as_if_nothing_had_happened(platform: Platform):
    requests = platform.prompts(8, seed=1)

    def preempt(rig, number):
        if number % 4 == 3:
            rig.tell(PreemptSome(1) if number % 8 == 3 else EvictSome(2))

    told = platform.run(requests, {"chunk": 9}, preempt)
    assert told.preemptions > 0
    assert told.tokens == platform.oracle(requests).tokens


def test_shared_prompts_are_folded(platform: Platform):
    requests = platform.prompts(6, seed=2, shared=85)
    assert platform.run(requests, {"chunk": 11}).tokens == platform.oracle(requests).tokens


def test_a_lost_worker_s_successor_goes_on(platform: Platform):
    requests = platform.prompts(4, seed=3)
    told = platform.run(requests, None, lambda rig, number: rig.kill_worker() if number in (2, 9) else None)
    assert told.tokens == platform.oracle(requests).tokens


def test_not_a_number_ends_one_sequence_only(platform: Platform):
    requests = {"well": [1, 2, 3, 4, 5, 6], "sick": [1, 2, POISON, 4, 5, 6, 7], "other": [9, 8, 7]}
    told = platform.poisoned().run(requests, {"chunk": 3})
    assert told.ended["sick"].reason is FinishReason.ERROR
    assert "NaN" in told.ended["sick"].detail
    del requests["sick"]
    assert {name: told.tokens[name] for name in requests} == platform.oracle(requests).tokens


# Sampling


@pytest.mark.parametrize(
    "sampling", [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.02}], ids=["temperature", "top_p", "top_k and min_p"]
)
def test_draws_are_those_of_the_oracle(platform: Platform, sampling):
    """Logits differ by rounding, so a draw at an edge may differ; hundreds that do not are no chance."""
    requests = platform.prompts(8, seed=4)
    asked = {"temperature": 0.8, "seed": 11, **sampling}
    found, wanted = platform.run(requests, **asked).tokens, platform.oracle(requests, **asked).tokens
    assert sum(found[name] == wanted[name] for name in requests) >= len(requests) - 1


def test_what_adjusts_logits(platform: Platform):
    """Of some of a batch, and the others do not notice."""
    requests = platform.prompts(6, seed=5)
    each = {
        "p0": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        "p1": {"logit_bias": ((7, 5.0), (9, -5.0))},
        "p2": {"bad_words": tuple((token,) for token in range(40)), "min_tokens": 3, "stop_token_ids": tuple(range(40, 70))},
        "p3": {"thinking": Thinking(end=5, budget=2, is_open=True)},
    }
    told = platform.run(requests, each=each)
    assert told.tokens == platform.oracle(requests, each=each).tokens
    assert told.tokens["p3"][2] == 5


def test_bad_words_of_several_tokens(platform: Platform):
    """What depends on the token before is right also where the host does not know that yet."""
    requests = platform.prompts(3, seed=6)
    free = platform.oracle(requests).tokens["p0"]
    asked = {"bad_words": ((free[0], free[1]), tuple(free[1:4]))}
    told = platform.run(requests, **asked).tokens
    assert told == platform.oracle(requests, **asked).tokens
    assert told["p0"][:2] != free[:2]


@pytest.mark.parametrize("chunk", [5, None])
def test_log_probabilities_of_outputs_and_prompts(platform: Platform, chunk):
    requests = platform.prompts(4, seed=7)
    told = platform.run(requests, {"chunk": chunk}, logprobs=3, prompt_logprobs=2)
    wanted = platform.oracle(requests, logprobs=3, prompt_logprobs=2)
    assert told.tokens == wanted.tokens
    for name in requests:
        assert sorted(told.words[name]) == sorted(wanted.words[name])
        for position, word in wanted.words[name].items():
            ours = told.words[name][position]
            assert (ours.token, ours.rank) == (word.token, word.rank)
            assert ours.logprob == pytest.approx(word.logprob, abs=1e-3)


# Structured output


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "top_p": 0.95, "seed": 5, "frequency_penalty": 0.3}], ids=["greedy", "random"]
)
def test_grammars(platform: Platform, sampling):
    requests = platform.prompts(5, seed=8)
    asked = {**sampling, "max_tokens": 24, "stop_token_ids": (END,), "each": {n: {"grammar": g} for n, g in GRAMMARS.items()}}
    told = platform.run(requests, **asked)
    wanted = platform.oracle(requests, **asked)
    assert sum(told.tokens[name] == wanted.tokens[name] for name in requests) >= len(requests) - bool(sampling)
    for name in GRAMMARS:
        if told.ended[name].reason is FinishReason.STOP:
            assert fits(name, b"".join(TOKENS[token] for token in told.tokens[name] if token != END).decode())
    assert sum(told.ended[name].reason is FinishReason.STOP for name in GRAMMARS) >= 2


def test_preempted_grammars_and_lost_workers(platform: Platform):
    requests = platform.prompts(5, seed=9)
    asked = {"max_tokens": 16, "stop_token_ids": (END,), "each": {name: {"grammar": one} for name, one in GRAMMARS.items()}}

    def disturb(rig, number):
        if number == 7:
            rig.kill_worker()
        elif number in (3, 11, 15):
            rig.tell(PreemptSome(2))

    told = platform.run(requests, {"chunk": 7}, disturb, **asked)
    assert told.preemptions > 0
    assert told.tokens == platform.oracle(requests, **asked).tokens


def test_a_grammar_that_leaves_nothing_fails_alone(platform: Platform):
    requests = {"bad": [3], "good": [4]}
    abc = Grammar("regex", "abc", ends=(END,))
    each = {"bad": {"bad_words": ((TOKENS.index(b"b"),),)}}
    told = platform.run(requests, grammar=abc, stop_token_ids=(END,), each=each)
    assert told.ended["bad"].reason is FinishReason.ERROR
    assert b"".join(TOKENS[token] for token in told.tokens["good"] if token != END) == b"abc"


# Embeddings


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings(platform: Platform, pooling):
    """Beside others that generate. In one go, in chunks, and where a chunk is one token."""
    requests = platform.prompts(4, seed=10)
    requests["p0"] = requests["p0"][:1]
    each = {name: {"pooling": pooling, "max_tokens": 1} for name in list(requests)[:3]}
    wanted = platform.oracle(requests, each=each)
    assert list(wanted.vectors) == list(each)
    of_chunks = []
    for chunk in (None, 4) if platform.name != "interpreted" else (4,):
        told = platform.run(requests, {"chunk": chunk}, each=each)
        assert told.tokens == wanted.tokens
        for name, vector in wanted.vectors.items():
            numbers = np.frombuffer(told.vectors[name], "<f4")
            assert abs(np.linalg.norm(numbers) - 1.0) < 1e-6
            np.testing.assert_allclose(numbers, np.frombuffer(vector, "<f4"), atol=2e-5)
        of_chunks.append(told.vectors)
    if platform.same_bits:
        assert of_chunks[0] == of_chunks[1]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_of_preempted_prompts(platform: Platform, pooling):
    requests = platform.prompts(4, seed=11)
    wanted = platform.oracle(requests, pooling=pooling, max_tokens=1).vectors
    told = platform.run(
        *(requests, {"chunk": 4, "slots": 2}, lambda rig, number: rig.tell(PreemptSome(1)) if number in (1, 3, 6) else None),
        pooling=pooling,
        max_tokens=1,
    )
    assert told.preemptions > 0
    for name, vector in wanted.items():
        np.testing.assert_allclose(np.frombuffer(told.vectors[name], "<f4"), np.frombuffer(vector, "<f4"), atol=2e-5)


def test_a_prompt_that_is_not_finite_has_no_vector(platform: Platform):
    """Also where later chunks of it were launched before that was known."""
    requests = {"well": [1, 2, 3, 4, 5, 6], "sick": [POISON, 2, 3, 4, 5, 6, 7, 8]}
    told = platform.poisoned().run(requests, {"chunk": 2}, pooling="mean", max_tokens=1)
    assert told.ended["sick"].reason is FinishReason.ERROR
    assert list(told.vectors) == ["well"]


# Bits


@pytest.mark.parametrize("disturbed", [False, True])
def test_the_same_bits_in_any_company(platform: Platform, disturbed):
    """To the last bit of what the model thought of its tokens, where that is promised."""
    if not platform.same_bits:
        pytest.skip("promised by native kernels, and on a GPU by --deterministic")
    requests = platform.prompts(6, seed=12)

    def preempt(rig, number):
        if disturbed and number % 5 == 4:
            rig.tell(PreemptSome(1))

    together = platform.run(requests, {"chunk": 13}, preempt, logprobs=1)
    assert (together.preemptions > 0) == disturbed
    for name, prompt in requests.items():
        alone = platform.run({name: prompt}, logprobs=1)
        assert alone.tokens[name] == together.tokens[name]
        assert alone.words[name] == together.words[name]
