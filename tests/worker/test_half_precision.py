"""The forward pass in torch, in half precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rig import SEQUENCES, TINY, TINY_SEED, RigModel, forward_of, generate, make_pool, one_step, tiny_model, tiny_oracle

from baton.kvpool.layout import KVKind
from baton.worker.attention.gathered import GatheredAttention
from baton.worker.executors.stepwise import stepwise
from baton.worker.forward.base import LoadedForward
from baton.worker.forward.torch_forward import TorchForward
from dense_oracle import all_logits, dummy_model


def half_model() -> RigModel:
    decoder = dummy_model(TINY, seed=TINY_SEED, dtype=torch.bfloat16)
    loaded = LoadedForward(KVKind("bfloat16"), lambda pool: TorchForward(decoder, GatheredAttention(TINY, pool)))
    return RigModel(TINY, stepwise(loaded))


@pytest.fixture(scope="module")
def model():
    return tiny_model(compute="torch")


def test_half_precision_is_float32_outside():
    forward, flat = forward_of(half_model()), one_step(SEQUENCES)
    logits = forward.logits(forward.hidden(flat)[flat.last_rows])
    assert logits.dtype == np.float32
    exact = torch.stack([all_logits(tiny_oracle(), tokens)[-1] for tokens in SEQUENCES])
    assert torch.cosine_similarity(torch.from_numpy(logits), exact, dim=-1).min() > 0.999


def test_half_precision_generates(model):
    prompts = {"a": [1, 2, 3, 4, 5], "b": [9, 8]}
    half = generate(half_model(), prompts, max_tokens=4)
    assert {key: len(tokens) for key, tokens in half.items()} == {("a", 0): 4, ("b", 0): 4}
    assert half["b", 0][0] == generate(model, prompts, max_tokens=4)["b", 0][0]


def test_the_pool_may_hold_halves_whatever_is_computed_in(model):
    halves = tiny_model(compute="torch", kv_dtype="float16")
    flat = one_step(SEQUENCES)
    exact, ours = (forward_of(one).hidden(flat) for one in (model, halves))
    assert make_pool(halves, blocks=1, block_size=4).data.dtype == np.float16
    np.testing.assert_allclose(ours, exact, atol=2e-3)
    assert not np.array_equal(ours, exact)
