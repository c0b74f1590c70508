"""The C kernel gives what plain torch gives, and the same bits whatever else is in the step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from attention_cases import History, Shape

from baton.worker.attention.build import NoCompiler
from baton.worker.attention.gathered import GatheredAttention
from baton.worker.attention.native import NativeAttention

TOLERANCE = 1e-5


def native(history: History, pool, threads: int = 1) -> NativeAttention:
    try:
        return NativeAttention(history.shape.config(), pool, threads=threads)
    except NoCompiler as error:
        pytest.skip(str(error))


def random_shape(rng: random.Random) -> Shape:
    kv_heads = rng.choice([1, 2, 3])
    return Shape(
        heads=kv_heads * rng.choice([1, 2, 3, 4, 7]),
        kv_heads=kv_heads,
        head_dim=rng.choice([2, 6, 10, 16, 24, 40, 64, 80, 128]),
        block_size=rng.randint(1, 32) if rng.random() < 0.7 else 16,
        window=rng.choice([None, 1, 3, 17, 70]),
    )


def random_steps(rng: random.Random, lengths: list[int]) -> list[list[tuple[int, int, int]]]:
    """Every sequence from its first token to its last, in chunks of any size, in steps with any neighbours."""
    done, steps = [0] * len(lengths), []
    while any(at < n for at, n in zip(done, lengths, strict=True)):
        parts = []
        for sequence, n in enumerate(lengths):
            if done[sequence] < n and rng.random() < 0.7:
                count = min(rng.choice([1, 1, 2, 5, 33, 120]), n - done[sequence])
                parts.append((sequence, done[sequence], count))
                done[sequence] += count
        if parts:
            rng.shuffle(parts)
            steps.append(parts)
    return steps


@pytest.mark.parametrize("seed", range(40))
def test_kernel_equals_torch(seed):
    rng = random.Random(seed)
    history = History(random_shape(rng), [rng.randint(1, 200) for _ in range(rng.randint(1, 4))], seed)
    steps = random_steps(rng, history.lengths)
    pools = history.pool(), history.pool()
    backends = native(history, pools[0], threads=rng.choice([1, 2])), GatheredAttention(history.shape.config(), pools[1])
    for parts in steps:
        for layer in (0, 1):
            ours, expected = (torch.cat(history.run(backend, parts, layer)) for backend in backends)
            torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)
    assert np.array_equal(pools[0].data, pools[1].data, equal_nan=True)


@pytest.mark.parametrize("shape", [Shape(), Shape(head_dim=64), Shape(block_size=5, head_dim=10, window=9), Shape(heads=14)])
def test_a_sequence_gets_the_same_bits_in_any_chunks_and_company(shape):
    rng = random.Random(7)
    history = History(shape, [150, 1, 77, 130])
    alone = []
    for sequence, n in enumerate(history.lengths):
        alone.append([history.run(native(history, history.pool()), [(sequence, 0, n)], layer)[0] for layer in (0, 1)])
    for threads in (1, 2):
        backend = native(history, history.pool(), threads)
        for parts in random_steps(rng, history.lengths):
            for layer in (0, 1):
                for (sequence, at, count), out in zip(parts, history.run(backend, parts, layer), strict=True):
                    assert torch.equal(out, alone[sequence][layer][at : at + count])


def test_extreme_scores_stay_finite_and_right():
    history = History(Shape(head_dim=16), [90])
    history.q[0] *= 100.0
    pools = history.pool(), history.pool()
    parts = [(0, 0, 90)]
    ours = history.run(native(history, pools[0]), parts, 0)[0]
    expected = history.run(GatheredAttention(history.shape.config(), pools[1]), parts, 0)[0]
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)


def test_not_a_number_stays_in_its_own_sequence():
    history = History(Shape(), [40, 40])
    history.v[0][3] = float("nan")
    backend = native(history, history.pool())
    sick, well = history.run(backend, [(0, 0, 40), (1, 0, 40)], 0)
    assert sick[3:].isnan().any(-1).all()
    assert well.isfinite().all()
