"""Calibrates a balance for the inputs of every int8 matrix (csrc/matmul_int8.h).

Rounding a row to bytes makes an error that grows with the size of the whole row, and a product's error with the sizes of both
rows: |w| |x|. But for any positive d the product of w / d and d * x is the same, and of all d the one that makes
|w / d| |d x| smallest is, input by input, sqrt(|w| / |x|): activations that are large where weights are small no longer count.
On SmolLM2 this halves the loss of 8 bits (docs/internals/quantisation.md).

The size of the activations is measured: some tokens pass through the model once, packed without a balance; the choice of tokens
hardly matters. All arithmetic here is exact or correctly rounded (sums by fsum, sqrt), so two instances with the same kernels
have the same balance, bit for bit, and may exchange keys and values.
"""

from __future__ import annotations

from math import fsum

import numpy as np
from numpy.typing import NDArray

from baton.models.raw_tensor import Floats
from baton.native.decoder import NativeDecoder
from baton.native.exchange import RankExchange
from baton.native.library import KV_F32, Q8_0, Library, NativeStep
from baton.native.packing import PackedModel

TOKENS, TOKENS_OF_LARGE = 64, 16
"""Number of calibration tokens. A large model uses fewer: each takes as long as a token of a prompt. The balance is a fourth
root of mean squares, so 16 tokens, which know these to 18 %, give a balance to 5 %."""
FIRST_TOKEN, TOKEN_STEP = 17, 7919
"""Ids of the calibration tokens: spread over any vocabulary, without the special ones at its beginning."""
BLOCK_TOKENS = 16
WEIGHT_LEAST, ACTIVATION_LEAST = 0.01, 0.001
"""Minimum share of the mean square: smaller inputs are raised to this."""


def balance(library: Library, packed: PackedModel, exchange: RankExchange | None = None) -> None:
    """Packs the int8 matrices again, with a balance. Must be called once, before anything is computed. Of several ranks each
    has a balance for its part; all of them run the same tokens, or none."""
    tokens = calibration_tokens(packed) if packed.of_bytes else 0
    tokens = tokens if exchange is None else exchange.least(tokens)
    if tokens:
        for packing, activation_squares in zip(packed.of_bytes, listen(library, packed, tokens, exchange), strict=True):
            packing.balance[:] = best_balance(packing.squares, activation_squares)
            packing.run(library, packed.threads)
    packed.of_bytes.clear()


def best_balance(weights: Floats, activations: Floats) -> Floats:
    """The balance from squares per input, summed over rows; all ones if they are not finite."""
    w, x = _at_least(weights, WEIGHT_LEAST), _at_least(activations, ACTIVATION_LEAST)
    if w is None or x is None:
        return np.ones(len(weights), np.float32)
    return np.sqrt(np.sqrt(w / x)).astype(np.float32)


def _at_least(squares: Floats, share: float) -> NDArray[np.float64] | None:
    """Squares relative to their mean, at least `share`. None: they are not finite."""
    mean = fsum(squares.tolist()) / len(squares)
    return np.maximum(squares.astype(np.float64) / mean, share) if 0 < mean < np.inf else None


def calibration_tokens(packed: PackedModel) -> int:
    return min(TOKENS_OF_LARGE if packed.large else TOKENS, packed.config.context_tokens_max)


def listen(
    library: Library, packed: PackedModel, tokens: int | None = None, exchange: RankExchange | None = None
) -> list[Floats]:
    """Sums of the squares of the inputs, over tokens, for each int8 matrix."""
    tokens = tokens or calibration_tokens(packed)
    of_bytes = [matrix for matrix in packed.matrices() if matrix.kind == Q8_0]
    activation_squares = [np.zeros((tokens, matrix.inputs), np.float32) for matrix in of_bytes]
    for matrix, rows in zip(of_bytes, activation_squares, strict=True):
        matrix.input_squares = rows.ctypes.data
    _run_tokens(library, packed, tokens, exchange)
    for matrix in of_bytes:
        matrix.input_squares = None
    return [_sum_in_order(rows) for rows in activation_squares]


def _sum_in_order(rows: Floats) -> Floats:
    """Sums token by token, in a fixed order."""
    total = np.zeros(rows.shape[1], np.float32)
    for row in rows:
        total += row
    return total


def _run_tokens(library: Library, packed: PackedModel, tokens: int, exchange: RankExchange | None) -> None:
    """Runs a fixed text of this many tokens through the model, on a pool of its own."""
    config = packed.config
    blocks, half = -(-tokens // BLOCK_TOKENS), BLOCK_TOKENS * config.kv_heads * config.head_dim
    pool = np.zeros(blocks * config.layers * 2 * half, np.float32)
    decoder = NativeDecoder(
        library,
        packed,
        pool=pool.ctypes.data,
        blocks=blocks,
        block_size=BLOCK_TOKENS,
        half_block=half,
        kv_kind=KV_F32,
        threads=packed.threads,
        exchange=exchange,
    )
    ids = ((FIRST_TOKEN + TOKEN_STEP * np.arange(tokens)) % config.vocab_size).astype(np.int32)
    table, positions = np.arange(blocks, dtype=np.int32), np.arange(tokens)
    slots, starts, contexts = np.zeros(1, np.int64), np.array([0, tokens]), np.zeros(1, np.int64)
    arrays = (table, slots, starts, contexts, ids, positions)
    try:
        decoder.likeliest(decoder.hidden(NativeStep(1, tokens, blocks, *(array.ctypes.data for array in arrays))))
    finally:
        decoder.close()
