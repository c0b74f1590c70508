"""Pooled prompts: what they are, and that nothing that happens on the way changes a bit of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from rig import TINY, Rig, tiny_model, tiny_oracle

from baton.core.events import EvictSome, PreemptSome
from baton.protocol.request import FinishReason
from baton.worker.pooling import PromptPool
from dense_oracle import DenseAttention, DenseCache

KINDS = pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
PROMPTS = {f"p{count}": [random.Random(count).randrange(97) for _ in range(count)] for count in (1, 2, 13, 30, 41)}


@pytest.fixture(scope="module")
def model():
    return tiny_model(compute="native")


def vectors(rig: Rig) -> dict[str, bytes]:
    """Of those that have ended: each was told one, and the same where it was told again."""
    found = {}
    for (name, _), rows in rig.logprobs.items():
        told = {row.embedding for row in rows if row.embedding}
        assert len(told) == 1
        found[name] = told.pop()
    assert all(end.reason is FinishReason.LENGTH for end in rig.ended.values())
    assert set(found) == {name for name, _ in rig.ended}
    return found


def submit_all(rig: Rig, pooling: str) -> None:
    for name, prompt in PROMPTS.items():
        rig.submit(name, prompt, max_tokens=1, pooling=pooling)


def alone(model, pooling: str) -> dict[str, bytes]:
    found = {}
    for name, prompt in PROMPTS.items():
        rig = Rig(model, steps_in_flight=1)
        rig.submit(name, prompt, max_tokens=1, pooling=pooling)
        rig.run()
        found |= vectors(rig)
    return found


def oracle(prompt: list[int], pooling: str) -> np.ndarray:
    """By torch, whose forward is another."""
    rig = Rig(tiny_model(compute="torch"), steps_in_flight=1)
    seen = []
    forward = rig.runner.executor.forward
    hidden = forward.hidden
    forward.hidden = lambda flat: seen.append(hidden(flat)) or seen[-1]
    rig.submit("x", prompt, max_tokens=1)
    rig.run()
    states = tiny_oracle().final_norm(torch.from_numpy(np.concatenate(seen)[: len(prompt)])).double().numpy()
    vector = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[pooling]
    return vector / np.linalg.norm(vector)


@KINDS
def test_what_it_is(model, pooling):
    for name, vector in alone(model, pooling).items():
        numbers = np.frombuffer(vector, "<f4")
        assert numbers.shape == (32,)
        assert abs(np.linalg.norm(numbers) - 1.0) < 1e-6
        np.testing.assert_allclose(numbers, oracle(PROMPTS[name], pooling), atol=2e-5)


@KINDS
@pytest.mark.parametrize("chunk", [1, 3, 16, None])
def test_chunks_and_company_change_no_bit(model, pooling, chunk):
    rig = Rig(model, chunk=chunk)
    submit_all(rig, pooling)
    rig.submit("other", [5, 6, 7], max_tokens=9)
    rig.run()
    ends = rig.ended.pop(("other", 0))
    assert ends.output_tokens == 9
    assert vectors(rig) == alone(model, pooling)


@KINDS
@pytest.mark.parametrize("seed", range(3))
def test_preemptions_and_evictions_change_no_bit(model, pooling, seed):
    rng = random.Random(seed)
    rig = Rig(model, chunk=3, blocks=20, slots=3)
    submit_all(rig, pooling)
    rig.run(
        lambda step: rig.dispatch(rng.choice([PreemptSome(1), PreemptSome(2), EvictSome(4)])) if rng.random() < 0.3 else None
    )
    assert rig.instance.stats.preemptions > 0
    assert vectors(rig) == alone(model, pooling)


@KINDS
def test_a_lost_worker_changes_no_bit(model, pooling):
    rig = Rig(model, chunk=4)
    submit_all(rig, pooling)
    rig.run(lambda step: rig.kill_worker() if step in (3, 9) else None)
    assert rig.instance.stats.worker_losses == 2
    assert vectors(rig) == alone(model, pooling)


@KINDS
def test_what_is_cached_changes_no_bit(model, pooling):
    rig = Rig(model)
    for again in range(2):
        rig.submit(f"warm{again}", PROMPTS["p41"], max_tokens=1)
        rig.run()
    rig.logprobs.clear()
    rig.ended.clear()
    rig.submit("p41", PROMPTS["p41"], max_tokens=1, pooling=pooling)
    rig.run()
    assert vectors(rig)["p41"] == alone(model, pooling)["p41"]
    assert (rig.ended["p41", 0].cached_tokens > 0) == (pooling == "last")


def test_a_gap_in_a_prompt_is_found_out():
    pool = PromptPool("mean")
    pool.add(0, np.ones((3, 4), np.float32), last=False)
    with pytest.raises(ValueError, match="begins at 5"):
        pool.add(5, np.ones((1, 4), np.float32), last=True)


LABELS = (7, 96, 0)


def label_logits(model, **disturbance) -> dict[str, bytes]:
    rig = Rig(model, **disturbance)
    for name, prompt in PROMPTS.items():
        rig.submit(name, prompt, max_tokens=1, pooling="last", label_ids=LABELS)
    rig.run()
    return vectors(rig)


@pytest.mark.parametrize("compute", ["native", "torch"])
def test_label_logits_are_those_of_the_output_head(compute):
    """The oracle is the torch decoder, called once per prompt, without a pool."""
    found = label_logits(tiny_model(compute=compute))
    for name, prompt in PROMPTS.items():
        decoder, attention = tiny_oracle(), DenseAttention(TINY, [(DenseCache(TINY), len(prompt))])
        hidden = decoder.forward(torch.tensor(prompt), torch.arange(len(prompt)), attention)
        logits = decoder.logits(hidden[-1:])[0].numpy()
        np.testing.assert_allclose(np.frombuffer(found[name], "<f4"), logits[list(LABELS)], atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunks_and_company_change_no_bit_of_label_logits(model, chunk):
    one_by_one = {}
    for name, prompt in PROMPTS.items():
        rig = Rig(model, steps_in_flight=1)
        rig.submit(name, prompt, max_tokens=1, pooling="last", label_ids=LABELS)
        rig.run()
        one_by_one |= vectors(rig)
    assert label_logits(model, chunk=chunk) == one_by_one


def test_label_logits_use_cached_prefixes(model):
    rig = Rig(model)
    for name in ("first", "again"):
        rig.submit(name, PROMPTS["p41"], max_tokens=1, pooling="last", label_ids=LABELS)
        rig.run()
    found = vectors(rig)
    assert found["first"] == found["again"]
    assert rig.ended["again", 0].cached_tokens > 0
