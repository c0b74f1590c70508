"""Converts stored numbers to float32, bit for bit as the GGUF format's reference; and fp8 of safetensors.

Each function reads blocks as bytes, uint8 [n, block_bytes], and fills float32 out [n, block_elements]. The layouts, with the
byte counts in brackets (d, m: float16 scale and minimum; qs: packed numbers; qh: their high bits):

Q4_0  d[2] qs[16]                         value = d * (q - 8)      low nibbles first, then high nibbles
Q4_1  d[2] m[2] qs[16]                    value = d * q + m
Q5_0  d[2] qh[4] qs[16]                   value = d * (q - 16)     bit i of qh belongs to value i
Q5_1  d[2] m[2] qh[4] qs[16]              value = d * q + m
Q8_0  d[2] qs[32]                         value = d * q            q is signed
Q4_K  d[2] m[2] scales[12] qs[128]        value = d * scale * q - m * minimum, for 8 groups of 32 values
Q5_K  d[2] m[2] scales[12] qh[32] qs[128] the same; bit g of qh[i] belongs to value i of group g
Q6_K  ql[128] qh[64] scales[16] d[2]      value = d * scale * (q - 32), for 16 groups of 16 values
MXFP4 e[1] qs[16]                         value = 2^(e - 127) * one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 or their negatives

F8_E4M3  a sign, 4 bits of exponent, 3 of mantissa; scales are stored beside the matrix (tensor_types.SCALE_BLOCK)

Multiplication and addition stay separate steps: a fused one would round differently from the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from baton.models.raw_tensor import Bytes, Floats, RawTensor
from baton.models.tensor_types import SCALE_BLOCK

CHUNK_ELEMENTS = 1 << 16
"""Number of values per pass: 256 KiB of float32, so that the passes over a chunk hit the cache."""


def dequantise(raw: RawTensor) -> Floats:
    """The tensor's values in a new array."""
    values = np.empty(raw.shape, np.float32)
    dequantise_into(raw, values)
    return values


def dequantise_into(raw: RawTensor, out: Floats) -> None:
    """Writes the tensor's values to `out`, which is dense and in the tensor's shape."""
    if out.shape != raw.shape or not out.flags.c_contiguous:
        raise ValueError(f"a dense array of shape {raw.shape} is needed, not one of shape {out.shape}")
    kind, fill = raw.type, _FILL[raw.type.name]
    blocks = raw.data.reshape(-1, kind.block_bytes)
    values = out.reshape(-1, kind.block_elements)
    step = max(1, CHUNK_ELEMENTS // kind.block_elements)
    for start in range(0, len(blocks), step):
        fill(blocks[start : start + step], values[start : start + step])
    if raw.scales is not None:
        for row, scales in enumerate(np.repeat(raw.scales, SCALE_BLOCK, 1)[:, : raw.row_elements]):
            out[row * SCALE_BLOCK : (row + 1) * SCALE_BLOCK] *= scales


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at this byte of every block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, out: Floats) -> None:
    """Unpacks 4-bit numbers: packed [..., bytes] -> out [..., 2 * bytes], all low nibbles, then all high ones."""
    count = packed.shape[-1]
    out[..., :count] = packed & 0x0F
    out[..., count:] = packed >> 4


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Fifth bits as 16 or 0: 16 for every value whose bit in the four bytes from `at` on is set; [n, 32]."""
    bits = (blocks[:, at : at + 4, None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)
    return (bits << np.uint8(4)).reshape(-1, 32)


def _f64(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view(np.float64)


def _f32(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view(np.float32)


def _f16(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view(np.float16)


def _bf16(blocks: Bytes, out: Floats) -> None:
    """Values of bfloat16 numbers, which are the upper halves of float32 numbers."""
    np.left_shift(blocks.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


def _e4m3_values() -> Floats:
    """Values of e4m3 by byte. Exponent 0 marks subnormals; the largest encoding would be 480, and is NaN."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    size[byte & 127 == 127] = np.nan
    return np.where(byte < 128, size, -size).astype(np.float32)


E4M3_VALUES = _e4m3_values()


@cache
def _e4m3_pairs() -> NDArray[np.uint64]:
    """Both values of two adjacent bytes, as the bits of two floats."""
    both = np.arange(1 << 16)
    return np.stack((E4M3_VALUES[both & 255], E4M3_VALUES[both >> 8]), 1).view(np.uint64).reshape(-1)


def _f8_e4m3(blocks: Bytes, out: Floats) -> None:
    """Converts two values at a time: twice as fast as one. No index can be out of range, and mode "clip" skips that check."""
    stored, values = blocks.reshape(-1), out.reshape(-1)
    even = len(stored) // 2 * 2
    np.take(_e4m3_pairs(), stored[:even].view(np.uint16), out=values[:even].view(np.uint64), mode="clip")
    values[even:] = E4M3_VALUES[stored[even:]]


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:18], out)
    out -= 8.0
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:20], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 6:22], out)
    out += _fifth_bits(blocks, 2)
    out -= 16.0
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 8:24], out)
    out += _fifth_bits(blocks, 4)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks[:, 2:34].view(np.int8)
    out *= _half(blocks, 0)


def k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 groups of a Q4_K or Q5_K block, each float32 [n, 8, 1], times d and m.

    Twelve bytes hold sixteen 6-bit numbers. Bytes 0-3 end in the scales of groups 0-3, bytes 4-7 in their minimums;
    bytes 8-11 hold the low four bits of the scale (low nibble) and minimum (high nibble) of groups 4-7, whose upper two
    bits are the top bits of bytes 0-3 and 4-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 0x3F, (third & 0x0F) | ((first >> 6) << 4)), 1)
    minimums = np.concatenate((second & 0x3F, (third >> 4) | ((second >> 6) << 4)), 1)
    return (scales * _half(blocks, 0))[:, :, None], (minimums * _half(blocks, 2))[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    scales, minimums = k_scales(blocks)
    # 32 bytes hold two groups: one in the low nibbles, the next in the high ones.
    _nibbles(blocks[:, 16:144].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    groups = out.reshape(-1, 8, 32)
    groups *= scales
    groups -= minimums


def _q5_k(blocks: Bytes, out: Floats) -> None:
    scales, minimums = k_scales(blocks)
    _nibbles(blocks[:, 48:176].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    groups = out.reshape(-1, 8, 32)
    groups += ((blocks[:, 16:48][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1) << 4
    groups *= scales
    groups -= minimums


def _q6_k(blocks: Bytes, out: Floats) -> None:
    # The halves of a block are alike: 64 bytes of ql and 32 of qh hold 128 values, in four runs of 32.
    # run      0              1               2              3
    # ql       low of 0..31   low of 32..63   high of 0..31  high of 32..63
    # qh bits  0-1            2-3             4-5            6-7
    halves = out.reshape(-1, 2, 128)
    _nibbles(blocks[:, :128].reshape(-1, 2, 64), halves)
    shift = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift) & 3) << 4
    halves += high.reshape(-1, 2, 128)
    halves -= 32.0
    groups = out.reshape(-1, 16, 16)
    groups *= (blocks[:, 192:208].view(np.int8) * _half(blocks, 208))[:, :, None]


_E2M1 = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0], np.float32)
E2M1_TWICE: Floats = np.concatenate((_E2M1, -_E2M1))


def _mxfp4(blocks: Bytes, out: Floats) -> None:
    packed = blocks[:, 1:]
    out[:, :16] = E2M1_TWICE[packed & 0x0F]
    out[:, 16:] = E2M1_TWICE[packed >> 4]
    # Half the scale, from the bits of a float: below 2 ** -126 they are subnormal.
    exponent = blocks[:, :1].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (np.maximum(exponent, 1) - 1) << 23).astype(np.uint32)
    with np.errstate(over="ignore"):
        out *= bits.view(np.float32)


_FILL: dict[str, Callable[[Bytes, Floats], None]] = {
    "F64": _f64,
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "F8_E4M3": _f8_e4m3,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
