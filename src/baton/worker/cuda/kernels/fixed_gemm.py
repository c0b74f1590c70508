"""A matrix product whose bits do not depend on the number of rows, for deterministic results in any batch.

cuBLAS chooses another kernel, and another order of additions, for another number of rows. Here the order depends only on the
matrix. Its inputs are divided into parts, few or one; a part is summed from the first input to the last in one accumulator of
the tensor cores, and parts are added in order:

few rows     every part has its own program, which fills the chip; the last arriver adds them
many rows    one program computes one part after the other

The matrix is the left operand, and x the right one: few rows then cost little, because tensor cores need 64 rows on the left
but only 16 on the right.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2

SPREAD_ROWS_MAX = 256
"""Maximum of rows with a program for each part."""
PARTS_MAX = 8


class FixedScratch:
    def __init__(self, outputs: int, device: torch.device | str) -> None:
        """Partial sums for matrices of up to this many outputs; larger matrices have one part."""
        outputs = min(cdiv(outputs, 128) * 128, 192 * 64)
        self.sums = torch.empty(PARTS_MAX * outputs * SPREAD_ROWS_MAX, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(outputs // 64 * cdiv(SPREAD_ROWS_MAX, 16), dtype=torch.int32, device=device)


class FixedTuning(NamedTuple):
    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int


def parts_of(outputs: int, inputs: int) -> int:
    """Number of parts of a product. It depends only on the matrix."""
    parts = 1
    while 2 * parts * cdiv(outputs, 64) <= 192 and 2 * parts * 512 <= inputs and parts < PARTS_MAX:
        parts *= 2
    return parts


def fixed_tuning(rows: int) -> FixedTuning:
    if rows <= 64:
        return FixedTuning(64, max(16, next_power_of_2(rows)), 128, 4, 4)
    if rows <= 128:
        return FixedTuning(128, 128, 64, 8, 4)
    return FixedTuning(128, 256, 64, 8, 4)


@triton.jit(do_not_specialize=["rows"])
def _fixed_gemm(
    x, weight, bias, out, part_sums, arrived, rows, x_stride, out_stride,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, PART_INPUTS: tl.constexpr,
    SPREAD: tl.constexpr, SOME_OUTPUTS: tl.constexpr, SOME_ROWS: tl.constexpr, SOME_INPUTS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Programs that start together share rows of x or outputs of the matrix: 8 tiles of outputs by all tiles of rows.
    tiles_of_outputs, tiles_of_rows = tl.cdiv(OUTPUTS, SOME_OUTPUTS), tl.cdiv(rows, SOME_ROWS)
    in_group = 8 * tiles_of_rows
    group = tl.program_id(0) // in_group
    wide = tl.minimum(tiles_of_outputs - group * 8, 8)
    output = (group * 8 + tl.program_id(0) % in_group % wide) * SOME_OUTPUTS + tl.arange(0, SOME_OUTPUTS)
    row = tl.program_id(0) % in_group // wide * SOME_ROWS + tl.arange(0, SOME_ROWS)
    at = tl.arange(0, SOME_INPUTS)
    weight_at = weight + (output % OUTPUTS).to(tl.int64)[:, None] * INPUTS + at[None, :]
    x_at = x + (row % rows).to(tl.int64)[None, :] * x_stride + at[:, None]
    sums = tl.zeros([SOME_OUTPUTS, SOME_ROWS], tl.float32)
    for one in tl.static_range(1 if SPREAD else PARTS):
        part = tl.program_id(1) if SPREAD else one
        of_part = tl.zeros([SOME_OUTPUTS, SOME_ROWS], tl.float32)
        begin = part * PART_INPUTS
        for start in tl.range(begin, min(begin + PART_INPUTS, INPUTS), SOME_INPUTS, num_stages=STAGES):
            if INPUTS % SOME_INPUTS == 0:
                left, right = tl.load(weight_at + start), tl.load(x_at + start)
            else:
                left = tl.load(weight_at + start, mask=(at < INPUTS - start)[None, :], other=0.0)
                right = tl.load(x_at + start, mask=(at < INPUTS - start)[:, None], other=0.0)
            of_part = tl.dot(left, right, of_part, input_precision=PRECISION)
        sums = of_part if one == 0 else sums + of_part
    if SPREAD and PARTS > 1:
        tile = tl.program_id(0)
        place = tl.arange(0, SOME_OUTPUTS)[:, None] * SOME_ROWS + tl.arange(0, SOME_ROWS)[None, :]
        parts = part_sums + tile.to(tl.int64) * (PARTS * SOME_OUTPUTS * SOME_ROWS) + place
        tl.store(parts + tl.program_id(1) * (SOME_OUTPUTS * SOME_ROWS), sums)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") < PARTS - 1:
            return
        tl.store(arrived + tile, 0)
        sums = tl.load(parts, cache_modifier=".cg")
        for one in tl.static_range(1, PARTS):
            sums += tl.load(parts + one * (SOME_OUTPUTS * SOME_ROWS), cache_modifier=".cg")
    if BIAS:
        sums += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    out_at = out + row.to(tl.int64)[None, :] * out_stride + output[:, None]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=(output < OUTPUTS)[:, None] & (row < rows)[None, :])


def fixed_gemm(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scratch: FixedScratch, bias: torch.Tensor | None = None
) -> None:
    """The product in fixed order. x: [rows, inputs], weight: [outputs, inputs] -> out [rows, outputs]."""
    rows, (outputs, inputs) = len(x), weight.shape
    tuning, parts, spread = fixed_tuning(rows), parts_of(outputs, inputs), rows <= SPREAD_ROWS_MAX
    if x.dtype == torch.float32:  # tests use such sizes: fewer stages fit
        tuning = tuning._replace(outputs=64, rows=min(tuning.rows, 64), inputs=32, stages=2)
    _fixed_gemm[(cdiv(outputs, tuning.outputs) * cdiv(rows, tuning.rows), parts if spread else 1)](
        *(x, weight, x if bias is None else bias, out, scratch.sums, scratch.arrived, rows, x.stride(0), out.stride(0)),
        OUTPUTS=outputs,
        INPUTS=inputs,
        BIAS=bias is not None,
        PARTS=parts,
        PART_INPUTS=cdiv(inputs, parts * 128) * 128,
        SPREAD=spread,
        SOME_OUTPUTS=tuning.outputs,
        SOME_ROWS=tuning.rows,
        SOME_INPUTS=tuning.inputs,
        STAGES=tuning.stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
