"""A thought ends at its budget, at the same token whatever happens on the way."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import Rig, tiny_model

from baton.protocol.request import SamplingParams, sampling_bytes
from baton.protocol.thinking import Thinking
from baton.worker.thought import TOKENS_BEFORE_MAX, Thought

START, END = 95, 96
OPEN = Thinking(end=END, budget=5, start=START, is_open=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def forced_by(rules: Thinking, outputs: list[int]) -> int | None:
    return Thought(rules).forced(outputs)


@pytest.mark.parametrize(
    ("rules", "outputs", "token"),
    [
        (OPEN, [1, 2, 3, 4], None),
        (OPEN, [1, 2, 3, 4, 5], END),
        (OPEN, [1, 2, END, 4, 5, 6], None),
        (OPEN, [1, 2, 3, 4, 5, END], None),
        (Thinking(end=END, budget=0, is_open=True), [], END),
        (Thinking(end=END, budget=1, start=START), [], None),
        (Thinking(end=END, budget=1, start=START), [START], None),
        (Thinking(end=END, budget=1, start=START), [7, START, 3], END),
        (Thinking(end=END, budget=1, start=START), [7] * TOKENS_BEFORE_MAX + [START, 3, 3], None),
        (Thinking(end=END, budget=1, start=START), [START, 3, END, START, 3, 3], None),
        (Thinking(end=END, budget=0), [1], None),
    ],
)
def test_what_is_forced(rules, outputs, token):
    assert forced_by(rules, outputs) == token


@given(outputs=st.lists(st.sampled_from([1, START, END]), max_size=12), is_open=st.booleans(), budget=st.integers(0, 5))
def test_a_function_of_the_outputs(outputs, is_open, budget):
    """Asked at every token, or once after a preemption."""
    rules = Thinking(end=END, budget=budget, start=START, is_open=is_open)
    watch = Thought(rules)
    for count in range(len(outputs) + 1):
        assert watch.forced(np.array(outputs[:count], np.int32)) == forced_by(rules, outputs[:count])


SAMPLINGS = [{}, {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.2, "logprobs": 2}]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "random"])
def test_tokens_up_to_the_budget_are_those_of_any_run(model, sampling):
    told = {}
    for name, thinking in (("free", None), ("limited", OPEN)):
        rig = Rig(model)
        rig.submit("p", [5, 3, 60], n=2, max_tokens=12, thinking=thinking, **sampling)
        told[name] = rig.run()
    for key, limited in told["limited"].items():
        thought = limited[: limited.index(END)]
        assert len(thought) <= 5
        assert told["free"][key][: len(thought)] == thought
        assert len(limited) == 12


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "random"])
def test_preempted_and_killed_and_still_the_same(model, sampling):
    rng = random.Random(3)
    prompts = {f"p{i}": [rng.randrange(90) for _ in range(rng.randint(1, 20))] for i in range(6)}

    def run(disturb=None, **settings):
        rig = Rig(model, **settings)
        for name, prompt in prompts.items():
            rig.submit(name, prompt, n=2, max_tokens=12, thinking=OPEN, **sampling)
        tokens = rig.run(None if disturb is None else lambda number: disturb(rig, number))
        return rig, tokens

    _, expected = run()
    rig, tokens = run(blocks=20, block_size=4)
    assert rig.instance.stats.preemptions > 0
    assert tokens == expected
    _, tokens = run(lambda rig, number: rig.kill_worker() if number % 5 == 4 and number < 30 else None)
    assert tokens == expected


def test_a_closing_token_that_the_model_does_not_have_is_not_waited_for(model):
    rig = Rig(model)
    rig.submit("p", [5], max_tokens=4, thinking=Thinking(end=10_000, budget=0, is_open=True))
    assert len(rig.run()["p", 0]) == 4


def test_its_bytes_are_counted():
    assert sampling_bytes(SamplingParams(thinking=OPEN)) > sampling_bytes(SamplingParams())
