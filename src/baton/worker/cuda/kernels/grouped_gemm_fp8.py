"""Products of many rows of experts in fp8, as in grouped_gemm.py: rows are in 8 bits too (fp8_rows.py), and the tensor cores
multiply 8 bits.

Unpacking matrices, as for few rows, would cost more than it saves: here memory is not the limit. With block scales, sums of 128
inputs are multiplied by the scales of row and block.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.models.config import Activation
from baton.worker.cuda.kernels.fp8 import BLOCK_INPUTS, GROUP, Scales
from baton.worker.cuda.kernels.grouped_gemm import finish_tile
from baton.worker.cuda.kernels.route import RouteScratch, rows_of_tile
from baton.worker.cuda.kernels.sizes import cdiv

TILE_FROM, TILE_MOST = 32, 64
"""Rows per tile. With fewer rows unpacking is faster; more rows gain nothing."""


class GroupedFp8Tuning(NamedTuple):
    outputs: int
    stages: int
    warps: int


def tuning_for(scales: Scales, *, first: bool) -> GroupedFp8Tuning:
    """The sizes for this tile, measured on an H200 for 128 experts of 2048 x 768 (docs/internals/notes/gpu-kernels.md)."""
    if scales.blocks is None:
        return GroupedFp8Tuning(GROUP, 3, 4) if first else GroupedFp8Tuning(2 * GROUP, 3, 4)
    return GroupedFp8Tuning(GROUP, 4 if first else 3, 4)


@triton.jit
def _grouped_gemm_fp8(
    x, row_scales, weight, scales, blocks, bias, out, members, tiles, shares, row_stride,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PER_TOKEN: tl.constexpr, FIRST: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, SOME_OUTPUTS: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile * 2)
    if expert < 0:
        return
    pair, there, source = rows_of_tile(members, tiles, tile, TILE, PER_TOKEN, FIRST)
    output = tl.program_id(0) * SOME_OUTPUTS + tl.arange(0, SOME_OUTPUTS)
    at = tl.arange(0, BLOCK_INPUTS)
    ROWS: tl.constexpr = 2 * OUTPUTS if FIRST else OUTPUTS
    ALL: tl.constexpr = (INPUTS + BLOCK_INPUTS - 1) // BLOCK_INPUTS
    weight_at = weight + expert.to(tl.int64) * ROWS * INPUTS + (output % OUTPUTS)[:, None] * INPUTS + at[None, :]
    x_at = x + source.to(tl.int64)[:, None] * INPUTS + at[None, :]
    scale_at = blocks + (expert * ROWS + tl.program_id(0) * SOME_OUTPUTS).to(tl.int64) // SOME_OUTPUTS * ALL
    sums = tl.zeros([TILE, SOME_OUTPUTS], tl.float32)
    ups = tl.zeros([TILE, SOME_OUTPUTS], tl.float32)
    for number in tl.range(0, ALL, num_stages=STAGES):
        start = number * BLOCK_INPUTS
        if ALL * BLOCK_INPUTS == INPUTS:
            rows = tl.load(x_at + start, mask=there[:, None], other=0.0)
            some = tl.load(weight_at + start)
        else:
            inside = (at < INPUTS - start)[None, :]
            rows = tl.load(x_at + start, mask=there[:, None] & inside, other=0.0)
            some = tl.load(weight_at + start, mask=inside, other=0.0)
        if BLOCKS:
            row_scale = tl.load(row_scales + number * row_stride + source, mask=there, other=0.0)[:, None]
            sums += tl.dot(rows, tl.trans(some)) * (row_scale * tl.load(scale_at + number))
        else:
            sums = tl.dot(rows, tl.trans(some), sums)
        if FIRST:
            if ALL * BLOCK_INPUTS == INPUTS:
                some = tl.load(weight_at + start + OUTPUTS * INPUTS)
            else:
                some = tl.load(weight_at + start + OUTPUTS * INPUTS, mask=inside, other=0.0)
            if BLOCKS:
                up_scale = tl.load(scale_at + OUTPUTS // SOME_OUTPUTS * ALL + number)
                ups += tl.dot(rows, tl.trans(some)) * (row_scale * up_scale)
            else:
                ups = tl.dot(rows, tl.trans(some), ups)
    of_outputs = scales + expert * ROWS + output
    scale = tl.load(of_outputs, mask=output < OUTPUTS, other=0.0)[None, :]
    up_scale = tl.load(of_outputs + (ROWS - OUTPUTS), mask=output < OUTPUTS, other=0.0)[None, :]
    if not BLOCKS:
        row_scale = tl.load(row_scales + source, mask=there, other=0.0)[:, None]
        scale *= row_scale
        up_scale *= row_scale
    finish_tile(
        sums * scale, ups * up_scale, bias + expert * ROWS + output, out, shares, pair, there, output,
        OUTPUTS, FIRST, BIAS, not FIRST, ACTIVATION,
    )  # fmt: skip


def grouped_gemm_fp8(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: Scales,
    out: torch.Tensor,
    scratch: RouteScratch,
    tiles: int,
    tile: int,
    *,
    first: bool,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    tuning: GroupedFp8Tuning | None = None,
) -> None:
    """grouped_gemm() with x in fp8 and its scales [parts, rows] (Rows8Bits.rounded())."""
    _, outputs, inputs = weight.shape
    if first:
        outputs //= 2
    tuning = tuning or tuning_for(scales, first=first)
    _grouped_gemm_fp8[(cdiv(outputs, tuning.outputs), tiles)](
        *(x, row_scales, weight, scales.outputs, x if scales.blocks is None else scales.blocks),
        *(x if bias is None else bias, out, scratch.members, scratch.tiles, scratch.shares, row_scales.stride(0)),
        OUTPUTS=outputs,
        INPUTS=inputs,
        PER_TOKEN=scratch.picked.shape[1],
        FIRST=first,
        BLOCKS=scales.blocks is not None,
        TILE=tile,
        SOME_OUTPUTS=tuning.outputs,
        STAGES=tuning.stages,
        BIAS=bias is not None,
        ACTIVATION=activation,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
