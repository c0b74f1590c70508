"""What forward/base.py promises, of every forward pass there is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from rig import SEQUENCES, TINY, RigModel, forward_of, make_pool, make_runner, one_step, tiny_model, tiny_oracle

from baton.errors import InvariantBroken
from baton.models.reference import all_logits
from baton.worker.draws import NOT_FINITE_ID
from baton.worker.forward.base import Forward


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
