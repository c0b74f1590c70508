"""What forward/base.py promises, of the forward pass in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rig import TINY, TINY_SEED, RigModel, generate, make_pool, make_runner, tiny_model, tiny_oracle

from baton.errors import InvariantBroken
from baton.models.load import dummy_model
from baton.models.reference import all_logits
from baton.worker.attention.gathered import GatheredAttention
from baton.worker.flat_batch import FlatBatch, Spans
from baton.worker.forward.base import LoadedForward
from baton.worker.forward.torch_forward import TorchForward

SEQUENCES = [[5, 3, 60, 60, 1, 2, 9], [11], [30, 2, 7, 7]]


def one_step(sequences: list[list[int]], block_size: int = 4) -> FlatBatch:
    """Every sequence as a whole, each in blocks of its own."""
    counts = [len(tokens) for tokens in sequences]
    starts = np.cumsum([0, *counts]).astype(np.int64)
    width = -(-max(counts) // block_size)
    tables = np.arange(len(counts) * width, dtype=np.int32).reshape(len(counts), width)
    spans = Spans(tables, np.arange(len(counts)), starts, np.zeros(len(counts), np.int64))
    positions = np.concatenate([np.arange(count) for count in counts])
    return FlatBatch(spans, np.concatenate(sequences).astype(np.int32), positions, np.ones(len(counts), bool))


def half_model() -> RigModel:
    decoder = dummy_model(TINY, seed=TINY_SEED, dtype=torch.bfloat16)
    return RigModel(TINY, LoadedForward("bfloat16", lambda pool: TorchForward(decoder, GatheredAttention(TINY, pool))))


@pytest.fixture(scope="module")
def model():
    return tiny_model(compute="torch")


def forward_of(model: RigModel) -> TorchForward:
    return model.loaded.with_pool(make_pool(model, blocks=16, block_size=4))


def test_hidden_and_logits(model):
    forward, flat = forward_of(model), one_step(SEQUENCES)
    hidden = forward.hidden(flat)
    assert (hidden.shape, hidden.dtype) == ((12, TINY.hidden_size), np.float32)
    logits = forward.logits(hidden[flat.last_rows])
    assert (logits.shape, logits.dtype) == ((3, TINY.vocab_size), np.float32)
    for row, tokens in zip(logits, SEQUENCES, strict=True):
        np.testing.assert_allclose(row, all_logits(tiny_oracle(), tokens)[-1], atol=2e-5)
    again = logits.copy()
    logits[:] = -np.inf  # the caller may
    assert np.array_equal(forward.logits(hidden[flat.last_rows]), again)


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


def test_closing_lets_go_of_the_pool(model):
    pool = make_pool(model, blocks=8, block_size=4)
    runner = make_runner(model, pool, slots=2)
    kept = pool.values
    with pytest.raises(InvariantBroken, match="still in use"):
        runner.close()
    del kept
    pool = make_pool(model, blocks=8, block_size=4)
    make_runner(model, pool, slots=2).close()
    assert "closed" in repr(pool)
