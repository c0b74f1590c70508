"""Products of experts: each tile of rows (route.py) with the matrix of its expert.

A program per tile and some outputs. The first product of an MLP reads row pair // PER_TOKEN of x; the second the pair itself,
and its sums are multiplied by the pair's share. Results are written per pair, so no two programs write the same number;
`combine` adds the few pairs of a row, always in the same order.

Few rows per expert: the matrix is the left operand of the tensor cores, as in skinny_gemm.py. Many: the right one. Matrices in
fp8 (fp8.py) are unpacked in registers; grouped_gemm_fp8.py handles many rows of those.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.models.config import Activation
from baton.worker.cuda.kernels.fp8 import BLOCK_INPUTS, GROUP, Scales
from baton.worker.cuda.kernels.gated import gated
from baton.worker.cuda.kernels.route import RouteScratch, rows_of_tile
from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2

TILE_LEAST, TILE_MOST = 16, 128


def tile_for(rows: int, experts: int, per_token: int, *, fixed: bool) -> int:
    """Rows per tile: about twice an expert's average. fixed: independent of the number of rows."""
    wanted = 2 * rows * per_token // experts
    return TILE_LEAST if fixed or wanted <= 16 else 32 if wanted <= 64 else 64 if wanted <= 128 else TILE_MOST


class GroupedTuning(NamedTuple):
    swapped: bool
    "Whether the matrix is the left operand."
    outputs: int
    inputs: int
    stages: int
    warps: int


FEW_TILES = 16
"""Sizes for one or two rows: the chip is not filled, and more prefetching pays."""


def tuning_for(tile: int, tiles: int, *, first: bool, scales: Scales | None) -> GroupedTuning:
    """The sizes for this tile, measured on an H200 for 128 experts of 2048 x 768 (docs/internals/notes/gpu-kernels.md)."""
    if scales is not None:
        if tiles <= FEW_TILES:
            return GroupedTuning(True, GROUP, 128, 4, 4)
        wider = scales.blocks is None and not first
        return GroupedTuning(True, 2 * GROUP if wider else GROUP, 128, 2 if first and scales.blocks is None else 3, 4)
    if tile <= 32:
        return GroupedTuning(True, 64, 128, 4, 4)
    if tile < TILE_MOST:
        return GroupedTuning(False, 64 if first else 128, 64, 3, 4)
    return GroupedTuning(False, 128, 64, 4 if first else 3, 8)


@triton.jit
def _product(matrix, rows, sums, SWAPPED: tl.constexpr, PRECISION: tl.constexpr):
    if SWAPPED:
        return tl.dot(matrix, tl.trans(rows), sums, input_precision=PRECISION)
    else:
        return tl.dot(rows, tl.trans(matrix), sums, input_precision=PRECISION)


@triton.jit
def finish_tile(sums, ups, bias_at, out, shares, pair, there, output,
                OUTPUTS: tl.constexpr, PAIRED: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr,
                ACTIVATION: tl.constexpr):  # fmt: skip
    """sums, and ups of a first product: float32 [TILE, SOME_OUTPUTS] -> out, per pair."""
    if BIAS:
        sums += tl.load(bias_at, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
        if PAIRED:
            ups += tl.load(bias_at + OUTPUTS, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    if PAIRED:
        sums = gated(sums, ups, ACTIVATION)
    if SHARED:
        sums *= tl.load(shares + pair, mask=there, other=0.0)[:, None]
    mask = there[:, None] & (output < OUTPUTS)[None, :]
    tl.store(out + pair.to(tl.int64)[:, None] * OUTPUTS + output[None, :], sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _grouped_gemm(
    x, weight, scales, blocks, bias, out, members, tiles, shares, x_stride,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GATHER: tl.constexpr, PER_TOKEN: tl.constexpr, PAIRED: tl.constexpr,
    SHARED: tl.constexpr, SWAPPED: tl.constexpr, TILE: tl.constexpr, SOME_OUTPUTS: tl.constexpr, SOME_INPUTS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr, BLOCKS: tl.constexpr, HALF: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile * 2)
    if expert < 0:
        return
    pair, there, source = rows_of_tile(members, tiles, tile, TILE, PER_TOKEN, GATHER)
    output = tl.program_id(0) * SOME_OUTPUTS + tl.arange(0, SOME_OUTPUTS)
    at = tl.arange(0, SOME_INPUTS)
    ROWS: tl.constexpr = 2 * OUTPUTS if PAIRED else OUTPUTS
    matrix = weight + expert.to(tl.int64) * ROWS * INPUTS
    weight_at = matrix + (output % OUTPUTS)[:, None] * INPUTS + at[None, :]
    x_at = x + source.to(tl.int64)[:, None] * x_stride + at[None, :]
    SHAPE: tl.constexpr = [SOME_OUTPUTS, TILE] if SWAPPED else [TILE, SOME_OUTPUTS]
    sums = tl.zeros(SHAPE, tl.float32)
    ups = tl.zeros(SHAPE, tl.float32)
    if BLOCKS:  # the outputs of SOME_OUTPUTS are of one group; scales are loaded one round ahead
        ALL: tl.constexpr = (INPUTS + BLOCK_INPUTS - 1) // BLOCK_INPUTS
        scale_at = blocks + (expert * (ROWS // SOME_OUTPUTS) + tl.program_id(0)).to(tl.int64) * ALL
        up_scale_at = scale_at + OUTPUTS // SOME_OUTPUTS * ALL
        scale = tl.load(scale_at)
        up_scale = scale
        if PAIRED:
            up_scale = tl.load(up_scale_at)
    for start in tl.range(0, INPUTS, SOME_INPUTS, num_stages=STAGES):
        if INPUTS % SOME_INPUTS == 0:
            rows = tl.load(x_at + start, mask=there[:, None], other=0.0)
            some = tl.load(weight_at + start)
        else:
            inside = (at < INPUTS - start)[None, :]
            rows = tl.load(x_at + start, mask=there[:, None] & inside, other=0.0)
            some = tl.load(weight_at + start, mask=inside, other=0.0)
        if BLOCKS:
            next = min((start + SOME_INPUTS) // BLOCK_INPUTS, ALL - 1)
            next_scale = tl.load(scale_at + next)
            if PAIRED:
                next_up_scale = tl.load(up_scale_at + next)
        if SCALED:  # scaled as in skinny_gemm.py
            eighth = 0.125
            if BLOCKS and not PAIRED:
                eighth = 0.125 * scale
            some, rows = some.to(HALF), (rows.to(tl.float32) * eighth).to(HALF)
        if BLOCKS and PAIRED:
            sums += _product(some, rows, tl.zeros(SHAPE, tl.float32), SWAPPED, PRECISION) * scale
        else:
            sums = _product(some, rows, sums, SWAPPED, PRECISION)
        if PAIRED:
            if INPUTS % SOME_INPUTS == 0:
                some = tl.load(weight_at + start + OUTPUTS * INPUTS)
            else:
                some = tl.load(weight_at + start + OUTPUTS * INPUTS, mask=inside, other=0.0)
            if SCALED:
                some = some.to(HALF)
            if BLOCKS:
                ups += _product(some, rows, tl.zeros(SHAPE, tl.float32), SWAPPED, PRECISION) * up_scale
                up_scale = next_up_scale
            else:
                ups = _product(some, rows, ups, SWAPPED, PRECISION)
        if BLOCKS:
            scale = next_scale
    if SWAPPED:
        sums, ups = tl.trans(sums), tl.trans(ups)
    if SCALED:
        of_outputs = scales + expert * ROWS + output
        sums *= 8.0 * tl.load(of_outputs, mask=output < OUTPUTS, other=0.0)[None, :]
        if PAIRED:
            ups *= 8.0 * tl.load(of_outputs + OUTPUTS, mask=output < OUTPUTS, other=0.0)[None, :]
    finish_tile(
        sums, ups, bias + expert * ROWS + output, out, shares, pair, there, output,
        OUTPUTS, PAIRED, BIAS, SHARED, ACTIVATION,
    )  # fmt: skip


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    scratch: RouteScratch,
    tiles: int,
    tile: int,
    *,
    first: bool,
    scales: Scales | None = None,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    tuning: GroupedTuning | None = None,
) -> None:
    """weight: [experts, outputs, inputs] -> out per pair.

    scales: with fp8, of the outputs of all experts, as `bias`. first: x is [rows, inputs], and the first half of the outputs
    are gates of the second: out [pairs, outputs / 2]. Else x is [pairs, inputs], and out [pairs, outputs] is multiplied by the
    shares.
    """
    _, outputs, inputs = weight.shape
    if first:
        outputs //= 2
    wide = x.dtype == torch.float32  # tests use such sizes
    blocks = None if scales is None else scales.blocks
    tuning = tuning or tuning_for(tile, tiles, first=first, scales=scales)
    stages = 2 if wide else tuning.stages
    _grouped_gemm[(cdiv(outputs, tuning.outputs), tiles)](
        *(x, weight, x if scales is None else scales.outputs, x if blocks is None else blocks),
        *(x if bias is None else bias, out, scratch.members, scratch.tiles, scratch.shares, x.stride(0)),
        OUTPUTS=outputs,
        INPUTS=inputs,
        GATHER=first,
        PER_TOKEN=scratch.picked.shape[1],
        PAIRED=first,
        SHARED=not first,
        SWAPPED=tuning.swapped,
        TILE=tile,
        SOME_OUTPUTS=tuning.outputs,
        SOME_INPUTS=32 if wide else tuning.inputs,
        STAGES=stages,
        PRECISION="ieee" if wide else "tf32",
        SCALED=scales is not None,
        BLOCKS=blocks is not None,
        HALF=tl.float32 if wide else tl.float16,
        BIAS=bias is not None,
        ACTIVATION=activation,
        num_warps=tuning.warps,
        num_stages=stages,
    )


@triton.jit
def _combine(
    parts, picked, counts, out,
    EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, PARTLY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row == 0:  # the counts are not used any more
        expert = tl.arange(0, EXPERTS)
        tl.store(counts + expert, tl.zeros([EXPERTS], tl.int32))
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    width = tl.where(tl.load(picked + row * PER_TOKEN) >= 0, WIDTH, 0)  # a padding row has no parts
    here = out + row.to(tl.int64) * WIDTH + at
    sums = tl.zeros([BLOCK], tl.float32)
    if ADD:
        sums += tl.load(here, mask=inside, other=0.0).to(tl.float32)
    for one in tl.static_range(PER_TOKEN):
        if PARTLY:  # some pairs are of other ranks
            width = tl.where(tl.load(picked + row * PER_TOKEN + one) >= 0, WIDTH, 0)
        part = parts + (row.to(tl.int64) * PER_TOKEN + one) * WIDTH + at
        sums += tl.load(part, mask=at < width, other=0.0).to(tl.float32)
    tl.store(here, sums.to(out.dtype.element_ty), mask=inside)


def combine(parts: torch.Tensor, out: torch.Tensor, scratch: RouteScratch, *, add: bool, partly: bool = False) -> None:
    """Sum the experts' outputs. parts: [pairs, width] -> their sums per row, written to out [rows, width] or added to it.
    partly: some experts are on other ranks."""
    rows, width = out.shape
    _combine[(rows,)](
        *(parts, scratch.picked, scratch.counts, out),
        EXPERTS=len(scratch.counts),
        PER_TOKEN=scratch.picked.shape[1],
        WIDTH=width,
        ADD=add,
        PARTLY=partly,
        BLOCK=next_power_of_2(width),
        num_warps=4,
    )
