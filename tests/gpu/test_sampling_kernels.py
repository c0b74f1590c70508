"""Tokens chosen on the device against worker/draws.py, which is the definition."""

import numpy as np
import pytest
import torch

from baton.worker import draws as definition


def choose(place, logits, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, index=0, position=0, times=1):
    """Parameters: one for all rows, or one a row. Tokens of the kernels, and of the definition."""
    from baton.worker.cuda.columns import SlotColumns
    from baton.worker.cuda.kernels.argmax import argmax
    from baton.worker.cuda.kernels.sample import SampleScratch, sample

    rows, vocabulary = logits.shape
    wide = {
        name: np.broadcast_to(np.asarray(value, dtype), rows)
        for name, value, dtype in [
            ("temperature", temperature, np.float32), ("top_k", top_k, np.int32), ("top_p", top_p, np.float64),
            ("min_p", min_p, np.float64), ("seed", seed, np.uint64), ("index", index, np.int32),
        ]
    }  # fmt: skip
    slots = place.rng.permutation(rows + 3)[:rows]
    columns = SlotColumns(rows + 3, vocabulary, place.device).draws
    for column, (name, values) in zip(columns, wide.items(), strict=True):
        values = values.astype(np.uint64).view(np.int64) if name == "seed" else values
        column[torch.from_numpy(slots).to(place.device)] = torch.tensor(values, device=place.device)
    positions = np.broadcast_to(np.asarray(position, np.int32), rows)
    on_device = torch.from_numpy(logits).to(place.device)
    tokens, last = torch.full((rows,), -7, dtype=torch.int32, device=place.device), place.ints([-7] * (rows + 3))
    scratch = SampleScratch(rows, vocabulary, place.device)
    for _ in range(times):
        argmax(on_device, place.ints(slots), scratch.argmax, tokens, last)
        sample(on_device, place.ints(slots), place.ints(positions), columns, scratch, tokens, last)
    assert torch.equal(last[place.ints(slots).long()], tokens)
    asked = np.zeros(rows, definition.DRAW)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        asked[name] = wide[name]
    asked["uniform"] = definition.uniforms(
        wide["seed"].astype(np.uint64), wide["index"].astype(np.uint64), positions.astype(np.uint64)
    )
    return tokens.cpu().numpy(), definition.choose(logits, asked)


def random_logits(place, rows, vocabulary, spread=4.0):
    return (place.rng.standard_normal((rows, vocabulary)) * spread).astype(np.float32)


@pytest.mark.parametrize("vocabulary", [10, 4096, 5000, 9001])
def test_likeliest(place, vocabulary):
    found, wanted = choose(place, random_logits(place, 5, vocabulary))
    assert found.tolist() == wanted.tolist()


def test_lowest_id_wins_a_tie(place):
    logits = np.zeros((3, 9000), np.float32)
    logits[1, [8000, 5000, 4999]] = 2.0
    logits[2, 8999] = 1.0
    assert choose(place, logits)[0].tolist() == [0, 4999, 8999]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_fails_alone(place, value):
    logits = random_logits(place, 3, 6000)
    logits[1, 5500] = value
    for temperature, top_p in [(0.0, 1.0), (1.0, 1.0), (1.0, 0.5)]:
        found, wanted = choose(place, logits, temperature=temperature, top_p=top_p, seed=[1, 2, 3])
        assert found[1] == definition.NOT_FINITE_ID
        assert found.tolist() == wanted.tolist()


LIMITS = {
    "none": {},
    "top_k": {"top_k": 20},
    "top_k_1": {"top_k": 1},
    "top_k_large": {"top_k": 3000},
    "top_k_all": {"top_k": 4200},
    "top_p": {"top_p": 0.9},
    "top_p_tiny": {"top_p": 1e-9},
    "min_p": {"min_p": 0.05},
    "top_k_top_p": {"top_k": 40, "top_p": 0.95},
    "min_p_top_p": {"min_p": 0.01, "top_p": 0.8},
    "all_three": {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
}


SELDOM = [pytest.param(limits, marks=pytest.mark.slow) for limits in ({"top_k": 8500}, {"min_p": 0.001, "top_p": 0.7})]


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_draws(place, limits):
    rows = 3
    seeds = place.rng.integers(0, 2**64, rows, np.uint64)
    found, wanted = choose(
        place,
        random_logits(place, rows, 4200),
        temperature=place.rng.uniform(0.2, 1.6, rows),
        seed=seeds,
        index=place.rng.integers(0, 64, rows),
        position=place.rng.integers(0, 100_000, rows),
        **limits,
    )
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("limits", [{"top_p": 0.95}, *SELDOM], ids=str)
def test_draws_from_a_flat_distribution(place, limits):
    """More candidates than fit into registers."""
    found, wanted = choose(place, random_logits(place, 2, 9_000, 0.3), temperature=1.0, seed=[5, 6], **limits)
    assert found.tolist() == wanted.tolist()


@pytest.mark.slow
def test_equal_weights_are_told_apart_by_id(place):
    """Few different logits: nearly every limit falls among equals."""
    logits = place.rng.integers(0, 4, (6, 4200)).astype(np.float32)
    seeds = np.arange(6)
    for limits in ({"top_p": 0.6}, {"top_k": 50, "top_p": 0.5}, {"min_p": 0.3}):
        found, wanted = choose(place, logits, temperature=0.7, seed=seeds, position=3, **limits)
        assert found.tolist() == wanted.tolist()


def test_rows_of_all_kinds_together(place):
    rows = 8
    found, wanted = choose(
        place,
        random_logits(place, rows, 4500),
        temperature=[0.0, 1.0, 0.7, 0.0, 1.0, 1.3, 1.0, 0.9],
        top_k=[0, 0, 10, 5, 0, 0, 50, 0],
        top_p=[1.0, 1.0, 1.0, 0.5, 0.9, 1.0, 0.8, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.01, 0.0],
        seed=np.arange(rows),
        times=2,  # what is counted must be back at zero
    )
    assert found.tolist() == wanted.tolist()
