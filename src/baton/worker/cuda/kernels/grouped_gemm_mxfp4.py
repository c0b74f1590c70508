"""Products of experts in MXFP4, as in grouped_gemm.py: 4 bits per weight (e2m1), and a power of two per 32 inputs (e8m0).

    a byte of weights   | input 16 + j of the group | input j of the group |      j from 0 to 15

Weights are unpacked in registers. The low halves of the bytes are multiplied with the first 16 inputs of their groups and the
high halves with the others, in two products: so nothing is interleaved. An unpacked weight is exact in bfloat16.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.models.config import Activation
from baton.worker.cuda.kernels.grouped_gemm import finish_tile
from baton.worker.cuda.kernels.route import RouteScratch, rows_of_tile
from baton.worker.cuda.kernels.sizes import cdiv

GROUP = 32
"""Inputs that share a scale."""


class GroupedMxfp4Tuning(NamedTuple):
    swapped: bool
    "Whether the matrix is the left operand."
    outputs: int
    inputs: int
    stages: int
    warps: int


def tuning_for(tile: int, inputs: int) -> GroupedMxfp4Tuning:
    """The sizes for this tile: an estimate, not measured yet. Rounds of 64 inputs divide gpt-oss' 2880."""
    some = 128 if inputs % 128 == 0 else 64
    return (
        GroupedMxfp4Tuning(True, 64, some, 3, 4)
        if tile <= 32
        else GroupedMxfp4Tuning(False, 64, some, 3, 8 if tile > 64 else 4)
    )


def split_mxfp4(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split stored matrices: uint8 [rows, 17 bytes per 32 inputs] (models/dequantise.py) -> weights [rows, inputs / 2] and
    exponents [rows, inputs / 32]."""
    blocks = stored.view(len(stored), -1, GROUP // 2 + 1)
    weights = blocks[:, :, 1:].reshape(len(stored), -1)  # a view of the stored bytes, for matrices of a single block
    return weights.contiguous(), blocks[:, :, 0].contiguous()


@triton.jit
def _e2m1(bits, scale, KIND: tl.constexpr):
    """The values of e2m1 numbers: sign, two bits of exponent and one of mantissa are the upper bits of a float16 that is 2 **
    14 times too small."""
    half = (((bits & 7) << 9) | ((bits & 8) << 12)).to(tl.float16, bitcast=True)
    return (half.to(tl.float32) * scale).to(KIND)


@triton.jit
def _products(packed, exponent, low_rows, high_rows, sums, SWAPPED: tl.constexpr, PRECISION: tl.constexpr):
    scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 16384.0
    bits = packed.to(tl.uint16)
    low = _e2m1(bits & 15, scale, low_rows.dtype)
    high = _e2m1(bits >> 4, scale, low_rows.dtype)
    if SWAPPED:
        sums = tl.dot(low, tl.trans(low_rows), sums, input_precision=PRECISION)
        return tl.dot(high, tl.trans(high_rows), sums, input_precision=PRECISION)
    else:
        sums = tl.dot(low_rows, tl.trans(low), sums, input_precision=PRECISION)
        return tl.dot(high_rows, tl.trans(high), sums, input_precision=PRECISION)


@triton.jit
def _grouped_gemm_mxfp4(
    x, weight, exponents, bias, out, members, tiles, shares, x_stride,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PER_TOKEN: tl.constexpr, FIRST: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, SWAPPED: tl.constexpr, TILE: tl.constexpr, SOME_OUTPUTS: tl.constexpr,
    SOME_INPUTS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile * 2)
    if expert < 0:
        return
    pair, there, source = rows_of_tile(members, tiles, tile, TILE, PER_TOKEN, FIRST)
    output = tl.program_id(0) * SOME_OUTPUTS + tl.arange(0, SOME_OUTPUTS)
    byte = tl.arange(0, SOME_INPUTS // 2)
    at = byte // 16 * 32 + byte % 16
    ROWS: tl.constexpr = 2 * OUTPUTS if FIRST else OUTPUTS
    line = expert.to(tl.int64) * ROWS + (output % OUTPUTS)[:, None]
    weight_at = weight + line * (INPUTS // 2) + byte[None, :]
    exponent_at = exponents + line * (INPUTS // 32) + (byte // 16)[None, :]
    x_at = x + source.to(tl.int64)[:, None] * x_stride + at[None, :]
    SHAPE: tl.constexpr = [SOME_OUTPUTS, TILE] if SWAPPED else [TILE, SOME_OUTPUTS]
    sums = tl.zeros(SHAPE, tl.float32)
    ups = tl.zeros(SHAPE, tl.float32)
    for start in tl.range(0, INPUTS, SOME_INPUTS, num_stages=STAGES):
        inside = (at < INPUTS - start)[None, :]
        low_rows = tl.load(x_at + start, mask=there[:, None] & inside, other=0.0)
        high_rows = tl.load(x_at + start + 16, mask=there[:, None] & inside, other=0.0)
        if INPUTS % SOME_INPUTS == 0:
            packed = tl.load(weight_at + start // 2)
            exponent = tl.load(exponent_at + start // 32)
        else:
            packed = tl.load(weight_at + start // 2, mask=inside, other=0)
            exponent = tl.load(exponent_at + start // 32, mask=inside, other=0)
        sums = _products(packed, exponent, low_rows, high_rows, sums, SWAPPED, PRECISION)
        if FIRST:
            if INPUTS % SOME_INPUTS == 0:
                packed = tl.load(weight_at + OUTPUTS * (INPUTS // 2) + start // 2)
                exponent = tl.load(exponent_at + OUTPUTS * (INPUTS // 32) + start // 32)
            else:
                packed = tl.load(weight_at + OUTPUTS * (INPUTS // 2) + start // 2, mask=inside, other=0)
                exponent = tl.load(exponent_at + OUTPUTS * (INPUTS // 32) + start // 32, mask=inside, other=0)
            ups = _products(packed, exponent, low_rows, high_rows, ups, SWAPPED, PRECISION)
    if SWAPPED:
        sums, ups = tl.trans(sums), tl.trans(ups)
    finish_tile(
        sums, ups, bias + expert * ROWS + output, out, shares, pair, there, output,
        OUTPUTS, FIRST, BIAS, not FIRST, ACTIVATION,
    )  # fmt: skip


def grouped_gemm_mxfp4(
    x: torch.Tensor,
    weight: torch.Tensor,
    exponents: torch.Tensor,
    out: torch.Tensor,
    scratch: RouteScratch,
    tiles: int,
    tile: int,
    *,
    first: bool,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    tuning: GroupedMxfp4Tuning | None = None,
) -> None:
    """grouped_gemm() with weight [experts, outputs, inputs / 2] and the exponents of all experts (split_mxfp4())."""
    _, outputs, half = weight.shape
    if first:
        outputs //= 2
    wide = x.dtype == torch.float32  # tests use such sizes
    tuning = tuning or tuning_for(tile, 2 * half)
    stages = 2 if wide else tuning.stages
    _grouped_gemm_mxfp4[(cdiv(outputs, tuning.outputs), tiles)](
        *(x, weight, exponents, x if bias is None else bias),
        *(out, scratch.members, scratch.tiles, scratch.shares, x.stride(0)),
        OUTPUTS=outputs,
        INPUTS=2 * half,
        PER_TOKEN=scratch.picked.shape[1],
        FIRST=first,
        BIAS=bias is not None,
        ACTIVATION=activation,
        SWAPPED=tuning.swapped,
        TILE=tile,
        SOME_OUTPUTS=tuning.outputs,
        SOME_INPUTS=64 if wide else tuning.inputs,
        STAGES=stages,
        PRECISION="ieee" if wide else "tf32",
        num_warps=tuning.warps,
        num_stages=stages,
    )
