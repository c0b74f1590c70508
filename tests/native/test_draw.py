"""Choosing tokens in C: what the naive sampler and numpy choose, on every variant, and the same in any company."""

from __future__ import annotations

import random

import numpy as np
import pytest
from naive_sampler import naive_sample

from baton.native.library import Library, Model
from baton.protocol.request import SamplingParams
from baton.worker.draws import DRAW, NOT_FINITE_ID, NOTHING_LEFT_ID, choose, uniforms
from baton.worker.forward.native_forward import addresses_of
from baton.worker.token_masks import Masks

EDGE = 1e-5
"""A draw as near as this to the edge between two tokens may fall on either side: weights are rounded."""


class Chooser:
    """baton_choose of a vocabulary of this size."""

    def __init__(self, library: Library, vocabulary: int, threads: int = 1) -> None:
        self.library = library
        self.model = Model(vocabulary=vocabulary)
        self.runner = library.new(self.model, threads)

    def __call__(self, logits, draws, masks: Masks | None = None):
        tokens = np.full(len(logits), -99, np.int64)
        rows = np.array(logits, np.float32)  # its own: masked ones are changed
        allowed = None if masks is None else addresses_of(masks, len(rows))
        arrays = (rows.ctypes.data, draws.ctypes.data, None if allowed is None else allowed.ctypes.data)
        assert not self.library.choose(self.runner, *arrays, len(rows), tokens.ctypes.data)
        return tokens

    def __enter__(self) -> Chooser:
        return self

    def __exit__(self, *_) -> None:
        self.library.free(self.runner)


def some_params(rng: random.Random, vocabulary: int) -> SamplingParams:
    return SamplingParams(
        seed=rng.getrandbits(32),
        temperature=rng.choice([0.0, 0.25, 1.0, 2.0]),
        top_k=rng.choice([-1, 0, 1, 2, 5, 40, max(vocabulary - 1, 1), vocabulary, 10**12]),
        top_p=rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 0.05]),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.3, 1.0]),
    )


def draws_of(params: list[SamplingParams], vocabulary: int):
    seeds = np.array([p.seed for p in params], np.uint64)
    zeros = np.zeros(len(params), np.uint64)
    rows = [(0.0, p.top_p, p.min_p, p.temperature, min(p.top_k, vocabulary), 0, 0) for p in params]
    draws = np.array(rows, DRAW)
    draws["uniform"] = uniforms(seeds, zeros, zeros)
    return draws


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 64, 700])
def test_masked_rows_draw_as_if_the_other_tokens_had_been_excluded_before(library, vocabulary):
    rng, numbers = random.Random(1), np.random.default_rng(1)
    count = 60
    logits = numbers.standard_normal((count, vocabulary)).astype(np.float32) * 3
    draws = draws_of([some_params(rng, vocabulary) for _ in range(count)], vocabulary)
    masked = np.arange(0, count, 2)
    flags = numbers.random((len(masked), vocabulary)) < numbers.choice([0.1, 0.5, 1.0], (len(masked), 1))
    flags[3] = False
    words = np.packbits(flags, axis=1, bitorder="little")
    masks = Masks(masked, np.pad(words, ((0, 0), (0, -words.shape[1] % 4))).view(np.uint32))
    excluded, excluding = logits.copy(), draws.copy()
    excluded[masked] = np.where(flags, logits[masked], -np.inf)
    excluding["may_exclude"][masked] = 1
    with Chooser(library, vocabulary) as chooser:
        expected = chooser(excluded, excluding)
        assert chooser(logits, draws, masks).tolist() == expected.tolist()
        assert expected[6] == NOTHING_LEFT_ID
        assert np.count_nonzero(choose(logits.copy(), draws, masks) != expected) <= 1
        logits[4, 0] = logits[6, vocabulary - 1] = np.nan  # whatever is allowed
        said = chooser(logits, draws, masks)
        assert np.flatnonzero(said == NOT_FINITE_ID).tolist() == [4, 6]
        assert np.flatnonzero(choose(logits, draws, masks) == NOT_FINITE_ID).tolist() == [4, 6]


@pytest.mark.parametrize("vocabulary", [1, 2, 24, 63, 64, 65, 700])
def test_it_is_what_the_naive_sampler_draws(library, vocabulary):
    rng = random.Random(vocabulary)
    params = [some_params(rng, vocabulary) for _ in range(150)]
    logits = [[rng.randint(-64, 64) / 8 for _ in range(vocabulary)] for _ in params]  # ties are frequent and exact
    with Chooser(library, vocabulary) as chooser:
        tokens = chooser(np.array(logits), draws_of(params, vocabulary)).tolist()
    for row, settings, token in zip(logits, params, tokens, strict=True):
        expected, edge = naive_sample(row, settings, 0, [], [])
        assert edge <= EDGE or token == expected


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
def test_of_a_large_vocabulary_it_is_what_numpy_draws(library, spread):
    """Numpy sums in another order: one in a hundred may be on the other side of an edge, and none was when this was written."""
    rng, vocabulary = random.Random(1), 49_152
    logits = (np.random.default_rng(3).standard_normal((60, vocabulary)) * spread).astype(np.float32)
    draws = draws_of([some_params(rng, vocabulary) for _ in logits], vocabulary)
    with Chooser(library, vocabulary) as chooser:
        assert np.count_nonzero(chooser(logits, draws) != choose(logits, draws)) <= 1


def test_company_and_threads_change_nothing(library):
    rng, vocabulary = random.Random(2), 3000
    logits = (np.random.default_rng(4).standard_normal((50, vocabulary)) * 3).astype(np.float32)
    draws = draws_of([some_params(rng, vocabulary) for _ in logits], vocabulary)
    with Chooser(library, vocabulary) as chooser:
        alone = [int(chooser(logits[i : i + 1], draws[i : i + 1])[0]) for i in range(50)]
    for threads in (1, 2, 3):
        with Chooser(library, vocabulary, threads) as chooser:
            assert chooser(logits, draws).tolist() == alone


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1.0])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_found(library, temperature, poison):
    logits = np.zeros((3, 100), np.float32)
    logits[1, 70] = poison
    draws = draws_of([SamplingParams(temperature=temperature)] * 3, 100)
    with Chooser(library, 100) as chooser:
        said = chooser(logits, draws)
        assert said[1] == NOT_FINITE_ID
        assert (said[[0, 2]] >= 0).all()
        assert said.tolist() == choose(logits, draws).tolist()
        draws["may_exclude"] = 1
        excluding = chooser(logits, draws)
        assert (excluding[1] == NOT_FINITE_ID) == (poison != float("-inf"))
        assert excluding.tolist() == choose(logits, draws).tolist()


def test_excluded_tokens_are_never_drawn(library):
    logits = np.full((40, 130), -np.inf, np.float32)
    logits[:39, 129] = -5.0
    settings = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}]
    draws = draws_of([SamplingParams(temperature=1.0, seed=i, **settings[i % 4]) for i in range(40)], 130)
    draws["may_exclude"] = 1
    with Chooser(library, 130) as chooser:
        assert chooser(logits, draws).tolist() == [129] * 39 + [NOTHING_LEFT_ID]
