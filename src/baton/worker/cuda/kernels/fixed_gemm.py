"""A matrix product whose bits do not depend on how many rows there are: for results that are the same in any company.

cuBLAS chooses another kernel, another order of additions, for another number of rows. Here an output is always the sum over the
inputs in steps of 16, from the first to the last, in one accumulator of the tensor cores. The matrix is the left operand, and x
the right one: few rows then cost little, because tensor cores want 64 rows on the left and are content with 16 on the right.
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["rows"])
def _fixed_gemm(
    x, weight, bias, out, rows, x_stride, out_stride,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr, SOME_OUTPUTS: tl.constexpr, SOME_ROWS: tl.constexpr,
    SOME_INPUTS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
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
    for start in tl.range(0, INPUTS, SOME_INPUTS, num_stages=STAGES):
        if INPUTS % SOME_INPUTS == 0:
            left, right = tl.load(weight_at + start), tl.load(x_at + start)
        else:
            left = tl.load(weight_at + start, mask=(at < INPUTS - start)[None, :], other=0.0)
            right = tl.load(x_at + start, mask=(at < INPUTS - start)[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
    if BIAS:
        sums += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    out_at = out + row.to(tl.int64)[None, :] * out_stride + output[:, None]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=(output < OUTPUTS)[:, None] & (row < rows)[None, :])


def fixed_gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """x: [rows, inputs], weight: [outputs, inputs] -> out [rows, outputs]."""
    rows, (outputs, inputs) = len(x), weight.shape
    if rows <= 16:
        some_outputs, some_rows, some_inputs, warps, stages = 64, 16, 128, 4, 4
    elif rows <= 64:
        some_outputs, some_rows, some_inputs, warps, stages = 64, next_power_of_2(rows), 128, 4, 4
    else:
        some_outputs, some_rows, some_inputs, warps, stages = 128, 128, 64, 8, 4
    if x.dtype == torch.float32:
        some_inputs, stages = 32, 2
    _fixed_gemm[(cdiv(outputs, some_outputs) * cdiv(rows, some_rows),)](
        *(x, weight, x if bias is None else bias, out, rows, x.stride(0), out.stride(0)),
        OUTPUTS=outputs,
        INPUTS=inputs,
        BIAS=bias is not None,
        SOME_OUTPUTS=some_outputs,
        SOME_ROWS=some_rows,
        SOME_INPUTS=some_inputs,
        STAGES=stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
    )
