"""The attention kernel gives what plain torch gives, and the same bits whatever else is in the step."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import History, KernelAttention, Shape
from kernels import Team
from steps import random_steps

from baton.native.library import Library
from baton.worker.attention.gathered import GatheredAttention

TOLERANCE = 1e-5
DTYPES = ("float32", "float16")
SHAPES = (Shape(), Shape(head_dim=64), Shape(block_size=5, head_dim=10, window=9), Shape(heads=14))


def random_shape(rng: random.Random) -> Shape:
    kv_heads = rng.choice([1, 2, 3])
    return Shape(
        heads=kv_heads * rng.choice([1, 2, 3, 4, 7]),
        kv_heads=kv_heads,
        head_dim=rng.choice([2, 6, 10, 16, 24, 40, 64, 80, 128]),
        block_size=rng.randint(1, 32) if rng.random() < 0.7 else 16,
        window=rng.choice([None, 1, 3, 17, 70]),
        dtype=rng.choice(DTYPES),
    )


@pytest.mark.parametrize("seed", range(24))
def test_kernel_equals_torch(library, seed):
    rng = random.Random(seed)
    history = History(random_shape(rng), [rng.randint(1, 200) for _ in range(rng.randint(1, 4))], seed)
    config, pools = history.shape.config(), (history.pool(), history.pool())
    with Team(library, rng.choice([1, 2])) as team:
        backends = KernelAttention(team, config, pools[0]), GatheredAttention(config, pools[1])
        for parts in random_steps(rng, history.lengths):
            for layer in (0, 1):
                ours, expected = (torch.cat(history.run(backend, parts, layer)) for backend in backends)
                torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)
    assert np.array_equal(pools[0].data, pools[1].data, equal_nan=True)


def alone(library: Library, history: History) -> list[list[torch.Tensor]]:
    """Each sequence by itself, in one step: [sequence][layer]."""
    with Team(library) as team:
        backend = KernelAttention(team, history.shape.config(), history.pool())
        return [[history.run(backend, [part], layer)[0] for layer in (0, 1)] for part in history.all_at_once()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sequence_gets_the_same_bits_in_any_chunks_and_company(library, shape, dtype):
    rng = random.Random(7)
    history = History(replace(shape, dtype=dtype), [150, 1, 77, 130])
    expected = alone(library, history)
    for threads in (1, 2):
        with Team(library, threads) as team:
            backend = KernelAttention(team, history.shape.config(), history.pool())
            for parts in random_steps(rng, history.lengths):
                for layer in (0, 1):
                    for (sequence, at, count), out in zip(parts, history.run(backend, parts, layer), strict=True):
                        assert torch.equal(out, expected[sequence][layer][at : at + count])


def test_extreme_scores_stay_finite_and_right(library):
    history = History(Shape(head_dim=16), [90])
    history.q[0] *= 100.0
    parts, config = [(0, 0, 90)], history.shape.config()
    with Team(library) as team:
        ours = history.run(KernelAttention(team, config, history.pool()), parts, 0)[0]
    expected = history.run(GatheredAttention(config, history.pool()), parts, 0)[0]
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_what_is_no_number_stays_in_its_own_sequence(library, dtype, poison, where):
    history = History(Shape(dtype=dtype), [40, 40])
    getattr(history, where)[0][3] = poison
    with Team(library) as team:
        sick, well = history.run(KernelAttention(team, history.shape.config(), history.pool()), history.all_at_once(), 0)
    if where == "q":
        assert sick[3].isnan().all()
    elif not (where == "k" and poison == float("-inf")):  # that one is looked at by nobody, or by everybody
        assert not sick[3:].isfinite().all(-1).any()
    assert well.isfinite().all()
