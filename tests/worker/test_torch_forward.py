"""What forward/base.py promises, of the forward pass in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rig import TINY, make_pool, make_runner, tiny_model

from baton.errors import InvariantBroken
from baton.models.load import LoadedModel, dummy_model
from baton.models.reference import all_logits
from baton.models.tokenizer_source import TokenizerSource
from baton.worker.attention.choose import attention_for
from baton.worker.flat_batch import FlatBatch, Spans
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


def forward_of(model: LoadedModel, *, native: bool = True) -> TorchForward:
    pool = make_pool(model, blocks=16, block_size=4)
    return TorchForward(model.model, attention_for(model.config, pool, native=native))


@pytest.mark.parametrize("native", [True, False])
def test_hidden_and_logits(native):
    model = tiny_model()
    forward, flat = forward_of(model, native=native), one_step(SEQUENCES)
    hidden = forward.hidden(flat)
    assert (hidden.shape, hidden.dtype) == ((12, TINY.hidden_size), np.float32)
    logits = forward.logits(hidden[flat.last_rows])
    assert (logits.shape, logits.dtype) == ((3, TINY.vocab_size), np.float32)
    for row, tokens in zip(logits, SEQUENCES, strict=True):
        np.testing.assert_allclose(row, all_logits(model.model, tokens)[-1], atol=2e-5)
    again = logits.copy()
    logits[:] = -np.inf  # the caller may
    assert np.array_equal(forward.logits(hidden[flat.last_rows]), again)


def test_half_precision_is_float32_outside():
    model = LoadedModel(tiny_model().path, TINY, dummy_model(TINY, seed=3, dtype=torch.bfloat16), TokenizerSource(None, None))
    forward, flat = forward_of(model), one_step(SEQUENCES)
    logits = forward.logits(forward.hidden(flat)[flat.last_rows])
    assert logits.dtype == np.float32
    exact = torch.stack([all_logits(tiny_model().model, tokens)[-1] for tokens in SEQUENCES])
    assert torch.cosine_similarity(torch.from_numpy(logits), exact, dim=-1).min() > 0.999


@pytest.mark.parametrize("native", [True, False])
def test_closing_lets_go_of_the_pool(native):
    model = tiny_model()
    pool = make_pool(model, blocks=8, block_size=4)
    runner = make_runner(model, pool, slots=2, native=native)
    kept = pool.values
    with pytest.raises(InvariantBroken, match="still in use"):
        runner.close()
    del kept
    pool = make_pool(model, blocks=8, block_size=4)
    make_runner(model, pool, slots=2, native=native).close()
    assert "closed" in repr(pool)
