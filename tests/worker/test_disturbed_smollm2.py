"""The real model, disturbed in every way at once: the tokens of the undisturbed run, and the same bits of log-probability.

Which company a token is in, how a prompt was cut, what came from the cache, what had to be computed twice: none of it shows.
"""

from __future__ import annotations

import random

import pytest
from rig import Rig, RigModel, load_path

from baton.core.events import EvictSome, PreemptSome
from baton.protocol.step import TokenLogprob
from baton.text.tokenizer import Tokenizer

SHARED = "Once upon a time, in a village by the sea, there lived an old clockmaker who had never left his street. "
TEXTS = (
    "The capital of France is",
    SHARED + "One morning",
    SHARED + "His name was",
    "def fibonacci(n):\n    ",
    SHARED + "One morning",
)
BLOCK_SIZE = 16
KEPT_TOKENS = 16
"""Of SHARED, which is 23 tokens long: whole blocks are shared."""
OUTPUT_TOKENS = 8
SAMPLINGS = (
    {"max_tokens": OUTPUT_TOKENS, "logprobs": 3},
    {"max_tokens": OUTPUT_TOKENS, "logprobs": 3, "temperature": 0.8, "top_p": 0.95, "seed": 17, "repetition_penalty": 1.1},
)

Words = dict[str, dict[int, TokenLogprob]]


@pytest.fixture(scope="module", params=["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "int8"))])
def model(request, smollm2_path) -> RigModel:
    return load_path(smollm2_path, quantization=request.param, compute="native", threads=2 if request.param == "auto" else 1)


@pytest.fixture(scope="module")
def prompts(smollm2_path) -> dict[str, list[int]]:
    tokenizer = Tokenizer.from_path(smollm2_path)
    return {f"p{i}": tokenizer.encode(text) for i, text in enumerate(TEXTS)}


def submit(rig: Rig, name: str, prompt: list[int]) -> None:
    rig.submit(name, prompt, **SAMPLINGS[int(name[1:]) % len(SAMPLINGS)])


@pytest.fixture(scope="module")
def alone(model, prompts) -> Words:
    """Each in a rig of its own: nothing shared, nothing short, one step at a time."""
    said = {}
    for name, prompt in prompts.items():
        rig = Rig(model, block_size=BLOCK_SIZE, blocks=8, steps_in_flight=1)
        submit(rig, name, prompt)
        rig.run()
        said[name] = rig.words(name)
        assert len(said[name]) == OUTPUT_TOKENS
        rig.close()
    return said


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_everything_at_once(model, prompts, alone, chunk):
    """A pool for half of them, prefixes from the cache, sequences that are sent back, and a worker that dies."""
    rng = random.Random(chunk)
    rig = Rig(model, block_size=BLOCK_SIZE, blocks=9, chunk=chunk, slots=4)
    for name, prompt in prompts.items():
        submit(rig, name, prompt)

    def disturb(step: int) -> None:
        if step == 6:
            rig.kill_worker()
        elif step > 12 and rng.random() < 0.15:
            rig.dispatch(rng.choice([PreemptSome(1), PreemptSome(2), EvictSome(2)]))

    rig.run(disturb)
    assert {name: rig.words(name) for name in prompts} == alone
    assert rig.instance.stats.preemptions > 0
    assert rig.instance.stats.worker_losses == 1
    assert max(end.cached_tokens for end in rig.ended.values()) >= KEPT_TOKENS
    rig.close()


def test_one_after_the_other_from_the_cache(model, prompts, alone):
    rig = Rig(model, block_size=BLOCK_SIZE, blocks=40)
    for name, prompt in prompts.items():
        submit(rig, name, prompt)
        rig.run()
        assert rig.words(name) == alone[name]
    assert [rig.ended[name, 0].cached_tokens for name in prompts] == [0, 0, KEPT_TOKENS, 0, KEPT_TOKENS]
    rig.close()


def test_prompts_are_thought_of_alike_in_any_chunks(model, prompts):
    """Log-probabilities of all tokens of a prompt: every row of a step, not only the last of each sequence."""
    said = []
    for chunk in (None, 1, 7):
        rig = Rig(model, block_size=BLOCK_SIZE, blocks=40, chunk=chunk)
        for name, prompt in prompts.items():
            rig.submit(name, prompt, max_tokens=1, prompt_logprobs=1)
        rig.run()
        said.append({name: rig.words(name) for name in prompts})
        assert [len(words) for words in said[-1].values()] == [len(prompt) - 1 for prompt in prompts.values()]
        rig.close()
    assert said[0] == said[1] == said[2]
