"""Quantises float32 matrices to blocks of 8 or 4 bits, and decides the type of each weight.

Q8_0   value = d * q          d = the largest magnitude of 32 neighbours / 127, q from -127 to 127
Q4_1   value = d * q + m      m = about the minimum of 32 neighbours, d = about their range / 15, q from 0 to 15

Q4_K becomes Q4_1 without rounding its numbers again; each group's scale and minimum become float16. For Q4_1 of floats a
slightly smaller range is often better: the few values at its ends are clipped, all others are rounded more finely. So a few
ranges are tried per block, and the one with the least squared error is used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from baton.config import Quantization
from baton.models.dequantise import dequantise, k_scales
from baton.models.parameters import EMBED, LM_HEAD
from baton.models.raw_tensor import Bytes, Floats, RawTensor, TensorFacts
from baton.models.tensor_types import F32, MXFP4, Q4_0, Q4_1, Q4_K, Q8_0, TensorType

BLOCK = 32
CHUNK_BLOCKS = 2048
"""Number of blocks per pass: 256 KiB of float32, so that the passes over a chunk hit the cache."""
SHRINKS = (0.0, 0.01, 0.02, 0.03)
"""Shares of the range that are clipped at both ends. The first wins a tie, so numbers on a grid of 16 are unchanged."""

ROW_MOST = 65536
"""Maximum row length for integer arithmetic: 65,536 products of 127 and 255 fit 31 bits."""

FOUR_BITS = (Q4_0, Q4_1, MXFP4)
BLOCK_TYPES = (Q8_0, *FOUR_BITS)
"""Types that quantised linears (models/layers/linear.py) compute with."""


def type_for(raw: TensorFacts, name: str, quantization: Quantization) -> TensorType:
    """The compute type of a parameter: one of BLOCK_TYPES, or F32. `name`: ours (models/parameters.py).

    none    float32; also for fp8: a GPU quantises weights after loading
    int8    Q8_0
    int4    Q4_0, Q4_1, MXFP4 unchanged, the rest Q4_1; but embedding and head Q8_0: 4 bits cost much there and save little
    auto    Q8_0, Q4_0, Q4_1, MXFP4 unchanged, the rest Q8_0

    Q4_K counts as Q4_1 (it has the same numbers).

    Vectors, matrices whose rows are not whole blocks, and matrices with rows so long that integer sums would overflow 32 bits,
    are always float32.
    """
    if name.endswith((".mlp.router.weight", ".mlp.shared_gate.weight")):  # routers are small, and errors in routing are costly
        return F32
    if quantization in ("none", "fp8") or len(raw.shape) < 2 or raw.row_elements % BLOCK or raw.row_elements > ROW_MOST:
        return F32
    at_ends = name in (EMBED, LM_HEAD)
    kept: dict[str, tuple[TensorType, ...]] = {
        "auto": BLOCK_TYPES,
        "int8": (Q8_0,),
        "int4": BLOCK_TYPES if at_ends else FOUR_BITS,
    }
    stored = Q4_1 if raw.type == Q4_K else raw.type
    if stored in kept[quantization]:
        return stored
    return Q4_1 if quantization == "int4" and not at_ends else Q8_0


def weights_as(raw: RawTensor, name: str, quantization: Quantization) -> RawTensor:
    return converted(raw, type_for(raw, name, quantization))


def converted(raw: RawTensor, kind: TensorType) -> RawTensor:
    """The tensor in type `kind`: F32, Q8_0 or Q4_1, or the tensor's own type."""
    if kind == F32:
        return _as_float32(raw)
    if kind == raw.type:
        return raw
    if (raw.type, kind) == (Q4_K, Q4_1):
        return _q4_1_of_q4_k(raw)
    return (to_q8_0 if kind == Q8_0 else to_q4_1)(dequantise(raw))


def _as_float32(raw: RawTensor) -> RawTensor:
    """The tensor as float32. A float32 tensor is not copied, unless it is unaligned."""
    if raw.type != F32:
        return RawTensor.of_floats(dequantise(raw))
    return RawTensor(F32, raw.shape, np.require(raw.data.view(np.float32), requirements="A").view(np.uint8))


def to_q8_0(values: Floats) -> RawTensor:
    """The values as Q8_0. values: [rows, a multiple of 32]."""
    return _in_chunks(values, Q8_0, _q8_0)


def to_q4_1(values: Floats) -> RawTensor:
    """The values as Q4_1. values: [rows, a multiple of 32]."""
    return _in_chunks(values, Q4_1, _q4_1)


def _q4_1_of_q4_k(raw: RawTensor) -> RawTensor:
    blocks = raw.data.reshape(-1, Q4_K.block_bytes)
    scales, minimums = k_scales(blocks)
    out = np.empty((len(blocks) * 8, Q4_1.block_bytes), np.uint8)
    _put_half(out, 0, scales.reshape(-1))
    _put_half(out, 2, -minimums.reshape(-1))
    pairs = blocks[:, 16:].reshape(-1, 4, 1, BLOCK)
    whole = np.concatenate((pairs & 15, pairs >> 4), 2).reshape(-1, BLOCK)
    out[:, 4:] = whole[:, :16] | whole[:, 16:] << 4
    return RawTensor(Q4_1, raw.shape, out.reshape(raw.rows, -1))


def _in_chunks(values: Floats, kind: TensorType, fill: Callable[[Floats, Bytes], None]) -> RawTensor:
    rows, width = values.shape
    data = np.empty((rows, kind.row_bytes(width)), np.uint8)
    blocks, out = values.reshape(-1, BLOCK), data.reshape(-1, kind.block_bytes)
    for start in range(0, len(blocks), CHUNK_BLOCKS):
        part = slice(start, start + CHUNK_BLOCKS)
        # Transposed, so that numpy's inner loops run over blocks and not over the 32 values of one.
        fill(np.ascontiguousarray(blocks[part].T), out[part])
    return RawTensor(kind, (rows, width), data)


def _q8_0(x: Floats, out: Bytes) -> None:
    """Writes blocks of Q8_0. x: [32, blocks]; out: [blocks, bytes of one]."""
    d = _rounded_to_half(np.abs(x).max(0) / np.float32(127))
    q = np.rint(x / _divisor(d)).clip(-127, 127)
    _put_half(out, 0, d)
    out[:, 2:] = q.astype(np.int8).view(np.uint8).T


def _q4_1(x: Floats, out: Bytes) -> None:
    """Writes blocks of Q4_1. x: [32, blocks]. Of several ranges, each block gets the one with the least squared error."""
    least, most = x.min(0), x.max(0)
    width = most - least
    best_error = np.full(x.shape[1], np.inf, np.float32)
    best_d, best_m = np.zeros_like(least), np.zeros_like(least)
    best_q = np.zeros_like(x)
    for shrink in SHRINKS:
        cut = width * np.float32(shrink)
        d, m = _rounded_to_half((width - 2 * cut) / np.float32(15)), _rounded_to_half(least + cut)
        q = x - m
        q /= _divisor(d)
        np.rint(q, out=q)
        np.clip(q, 0, 15, out=q)
        error = q * d
        error += m
        error -= x
        error *= error
        total = error.sum(0)
        better = total < best_error
        for best, new in ((best_error, total), (best_d, d), (best_m, m), (best_q, q)):
            np.copyto(best, new, where=better)
    _put_half(out, 0, best_d)
    _put_half(out, 2, best_m)
    whole = best_q.astype(np.uint8)
    out[:, 4:] = (whole[:16] | whole[16:] << 4).T


def _rounded_to_half(x: Floats) -> Floats:
    """The value that the block's float16 will have: numbers are rounded against it, not against the exact scale."""
    return x.astype(np.float16).astype(np.float32)


def _divisor(d: Floats) -> Floats:
    """Divisor of a block. With scale 0 it has only zeros, whatever the divisor."""
    return np.where(d == 0, np.float32(np.inf), d)


def _put_half(out: Bytes, at: int, x: Floats) -> None:
    out[:, at : at + 2] = x.astype(np.float16)[:, None].view(np.uint8)
