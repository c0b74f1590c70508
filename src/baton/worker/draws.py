"""Stateless random draws: a function of (seed, sequence index, position) and of the distribution only.

The three numbers are hashed into one uniform number, which is looked up in the running sum of the weights. So a sequence draws
the same tokens alone or in a batch, before or after a preemption, here or on another instance.
"""

from __future__ import annotations

from math import isfinite

import numpy as np
from numpy.typing import NDArray

from baton.grammar.matcher import ceilings
from baton.worker.arrays import Doubles, Floats, Int64s
from baton.worker.token_masks import Masks

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]
Draws = NDArray[np.void]
"""Draw settings by row, [rows] of DRAW."""
DRAW = np.dtype(
    [
        *((name, np.float64) for name in ("uniform", "top_p", "min_p")),
        ("temperature", np.float32),
        *((name, np.int32) for name in ("top_k", "may_exclude", "unused")),
    ]
)
"""Sampling settings of a row, as native/csrc/sample.h reads them. `temperature` 0: greedy. `may_exclude`: minus infinity marks
an excluded token, and is not an error."""
NOT_FINITE_ID = -1
NOTHING_LEFT_ID = -2
TEMPERATURE_LEAST = 1e-30
"""Temperatures below this are greedy."""


def choose(logits: Floats, draws: Draws, masks: Masks | None = None) -> Int64s:
    """A token per row of [rows, vocabulary]. NOT_FINITE_ID for a row with NaN or infinity, NOTHING_LEFT_ID for a row whose
    tokens are all excluded. Logits of masked tokens become minus infinity."""
    weights = np.empty(logits.shape[1], np.float32)
    tokens = np.empty(len(logits), np.int64)
    bits = {} if masks is None else dict(zip(masks.rows.tolist(), masks.bits, strict=True))
    for i, row in enumerate(logits):
        best = row.argmax()
        tokens[i] = _checked(row, best, bool(draws["may_exclude"][i]))
        if i in bits and tokens[i] >= 0:
            np.minimum(row, ceilings(bits[i], row.size), out=row)
            best = row.argmax()
            tokens[i] = _checked(row, best, may_exclude=True)
        if tokens[i] < 0 or draws["temperature"][i] < TEMPERATURE_LEAST:
            continue
        # e^(logit / temperature), scaled so that the likeliest has 1. Row by row: a row's result depends on no other, and one
        # row of a large vocabulary stays in the cache.
        np.subtract(row, row[best], out=weights)
        np.divide(weights, draws["temperature"][i], out=weights)
        np.exp(weights, out=weights)
        uniform, top_p, min_p = (float(draws[name][i]) for name in ("uniform", "top_p", "min_p"))
        top_k = int(draws["top_k"][i])
        if top_k > 0 or top_p < 1.0 or min_p > 0.0:
            tokens[i] = draw_from_best(weights, uniform, top_k, top_p, min_p)
        else:
            tokens[i] = draw_from_all(weights, uniform)
    return tokens


def likeliest(logits: Floats, masks: Masks | None = None) -> Int64s:
    """The likeliest token of each row of [rows, vocabulary]. NOT_FINITE_ID if the row is not finite, NOTHING_LEFT_ID if its
    mask allows nothing."""
    # Row by row, so that the second pass hits the cache.
    tokens = np.array([_checked(row, row.argmax(), may_exclude=False) for row in logits], np.int64)
    for i, bits in zip(masks.rows.tolist(), masks.bits, strict=True) if masks is not None else ():
        if tokens[i] != NOT_FINITE_ID:
            row = np.minimum(logits[i], ceilings(bits, logits.shape[1]))
            tokens[i] = _checked(row, row.argmax(), may_exclude=True)
    return tokens


def _checked(row: Floats, best: np.int64, may_exclude: bool) -> np.int64 | int:
    """Whether each row is finite. `best`: index of the maximum. The first NaN of a row counts as its maximum, so maximum and
    minimum together check the whole row."""
    if may_exclude:
        return best if isfinite(row[best]) else NOTHING_LEFT_ID if row[best] == -np.inf else NOT_FINITE_ID
    return best if isfinite(row[best]) and isfinite(np.minimum.reduce(row)) else NOT_FINITE_ID


def uniforms(seeds: Words, indices: Words, positions: Words) -> Doubles:
    """Random numbers in [0, 1) with 53 random bits, one per row."""
    word = seeds
    for part in (indices, positions):
        word = _mixed(word + np.uint64(0x9E3779B97F4A7C15)) ^ part
    return (_mixed(word + np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(word: Words) -> Words:
    """The finaliser of SplitMix64, with wrap-around: every bit of the result depends on every bit of the word."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def draw_from_all(weights: Floats, uniform: float) -> int:
    """Draws by token id, without sorting: the order of a running sum does not change the odds."""
    return _look_up(np.cumsum(weights, dtype=np.float64), uniform)


def draw_from_best(weights: Floats, uniform: float, top_k: int, top_p: float, min_p: float) -> int:
    """Draws among the tokens that pass min-p, then top-k, then top-p of the remaining ones.

    The largest weight is 1. Ties with the k-th are included. Candidates are ordered by weight and then by id, so equal weights
    have an order too.
    """
    least = min_p
    if 0 < top_k < weights.size:
        least = max(least, float(np.partition(weights, -top_k)[-top_k]))
    mass = None
    if least == 0.0 and top_p < 1.0:
        # All tokens below this weigh less than 1 - top_p together, so none can be included: few are left to sort.
        mass = float(weights.sum(dtype=np.float64))
        least = 0.999 * (1.0 - top_p) * mass / weights.size
    candidates = np.flatnonzero(weights >= np.float32(least))
    kept = weights[candidates]
    order = _best_first(kept)
    sums = np.cumsum(kept[order], dtype=np.float64)
    if top_p < 1.0:
        # A token is included if those before it do not reach top_p; so the first always is.
        sums = sums[: 1 + int(np.searchsorted(sums[:-1], top_p * (mass or sums[-1])))]
    return int(candidates[order[_look_up(sums, uniform)]])


def _best_first(weights: Floats) -> Ids:
    """Candidates by weight, heaviest first, then in order of appearance. As integers the bits of positive floats have the same
    order; one sort of whole words is several times faster than a stable argsort."""
    words = (~weights.view(np.uint32)).astype(np.uint64) << np.uint64(32) | np.arange(weights.size, dtype=np.uint64)
    words.sort()
    return (words & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _look_up(sums: Doubles, uniform: float) -> int:
    """The first index whose running sum is above the uniform number; its weight cannot be zero."""
    return int(np.searchsorted(sums, uniform * sums[-1], side="right"))
