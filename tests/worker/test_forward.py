"""What forward/base.py promises, of every forward pass there is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from rig import SEQUENCES, TINY, RigModel, forward_of, make_pool, make_runner, one_step, tiny_model, tiny_oracle

from baton.errors import InvariantBroken
from baton.grammar.matcher import allowed
from baton.worker.draws import NOT_FINITE_ID, NOTHING_LEFT_ID
from baton.worker.forward.base import Forward
from baton.worker.token_masks import Masks
from dense_oracle import all_logits


@pytest.fixture(scope="module", params=["torch", "native"])
def model(request: pytest.FixtureRequest) -> RigModel:
    return tiny_model(compute=request.param)


@pytest.fixture
def forward(model: RigModel) -> Iterator[Forward]:
    forward = forward_of(model)
    yield forward
    forward.close()


def test_hidden_and_logits(forward):
    flat = one_step(SEQUENCES)
    hidden = forward.hidden(flat)
    assert (hidden.shape, hidden.dtype) == ((12, TINY.hidden_size), np.float32)
    logits = forward.logits(hidden[flat.last_rows])
    assert (logits.shape, logits.dtype) == ((3, TINY.vocab_size), np.float32)
    for row, tokens in zip(logits, SEQUENCES, strict=True):
        np.testing.assert_allclose(row, all_logits(tiny_oracle(), tokens)[-1], atol=2e-5)
    again = logits.copy()
    logits[:] = -np.inf  # the caller may
    assert np.array_equal(forward.logits(hidden[flat.last_rows]), again)


def test_the_likeliest_are_those_of_the_logits(forward):
    hidden = forward.hidden(one_step(SEQUENCES)).copy()
    assert forward.likeliest(hidden).tolist() == forward.logits(hidden).argmax(-1).tolist()
    assert forward.likeliest(np.zeros_like(hidden)).tolist() == [0] * len(hidden)  # of equal ones the first
    hidden[4] = np.nan
    found = forward.likeliest(hidden)
    assert (found == NOT_FINITE_ID).tolist() == [row == 4 for row in range(len(hidden))]


def test_the_likeliest_are_of_those_that_masks_allow(forward):
    """As if the logits had been stored and masked."""
    hidden = forward.hidden(one_step(SEQUENCES)).copy()
    rng = np.random.default_rng(3)
    rows = np.array([1, 2, 5, 6, 9])
    bits = rng.integers(0, 1 << 32, (len(rows), -(-TINY.vocab_size // 32)), np.uint32)
    bits[1], bits[2] = 0, 0
    bits[1, 2] = 1 << 7  # one token, and for the next row none
    masks = Masks(rows, bits)
    logits = forward.logits(hidden).copy()
    for row, words in zip(rows, bits, strict=True):
        logits[row] = np.where(allowed(words, TINY.vocab_size), logits[row], -np.inf)
    expected = logits.argmax(-1)
    expected[5] = NOTHING_LEFT_ID
    assert expected[2] == 2 * 32 + 7
    assert forward.likeliest(hidden, masks).tolist() == expected.tolist()
    assert (forward.likeliest(hidden) != expected).sum() >= 3
    zeros = np.zeros_like(hidden)  # of equal ones the first that is allowed
    first = [
        0 if row not in rows else int(np.flatnonzero(logits[row] > -np.inf)[0]) if row != 5 else NOTHING_LEFT_ID
        for row in range(12)
    ]
    assert forward.likeliest(zeros, masks).tolist() == first
    hidden[[4, 5, 6]] = np.nan  # whatever is allowed
    assert np.flatnonzero(forward.likeliest(hidden, masks) == NOT_FINITE_ID).tolist() == [4, 5, 6]


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
