"""Products of 2 to 32 rows, fused with the operation after them in a decoder layer: act(gate) * up, or the residual's addition.
With fp8 weights (fp8.py) up to 128 rows.

Memory is the limit, as for one row (gemv.py), but there are enough rows for the tensor cores. The matrix is the left operand,
because they need 64 rows there. x is the right one, padded to 16 or 32. If a matrix has few outputs, its inputs are divided
into splits to fill the chip; the last arriver adds them, always in the same order.

Block scales: a tile has one per 128 inputs. It is loaded one round ahead and multiplied into x; for a pair into the two sums of
a round, since x would be needed twice.
"""

import torch
import triton
import triton.language as tl

from baton.models.config import Activation
from baton.worker.cuda.kernels.fp8 import BLOCK_INPUTS, GROUP, Scales
from baton.worker.cuda.kernels.gated import gated
from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2

ROWS_MAX = 32
FP8_ROWS_MAX = 128
"""Maximum of rows in float32, which the tensor cores do not multiply with 8 bits; in bfloat16 8-bit products are faster from 33
rows on (fp8.py)."""
SOME_OUTPUTS, SOME_INPUTS = GROUP, 128
PROGRAMS = 192
SPLITS_MAX = 8


class SkinnyScratch:
    def __init__(self, outputs: int, device: torch.device | str, rows: int = ROWS_MAX) -> None:
        """Partial sums for matrices of up to `outputs` outputs."""
        tiles = min(cdiv(outputs, SOME_OUTPUTS), PROGRAMS // 2)  # larger matrices are not split
        self.sums = torch.empty(SPLITS_MAX * tiles * SOME_OUTPUTS * rows, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["rows"])
def _skinny_gemm(
    x, weight, scales, blocks, bias, residual, out, part_sums, arrived, rows, x_stride, out_stride,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PAIRED: tl.constexpr,
    SPLITS: tl.constexpr, SOME_OUTPUTS: tl.constexpr, SOME_INPUTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, SCALED: tl.constexpr, BLOCKS: tl.constexpr, HALF: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    tile, split = tl.program_id(0), tl.program_id(1)
    output = tile * SOME_OUTPUTS + tl.arange(0, SOME_OUTPUTS)
    row = tl.arange(0, ROWS)
    at = tl.arange(0, SOME_INPUTS)
    size: tl.constexpr = (INPUTS + SPLITS * SOME_INPUTS - 1) // (SPLITS * SOME_INPUTS) * SOME_INPUTS
    weight_at = weight + (output % OUTPUTS).to(tl.int64)[:, None] * INPUTS + at[None, :]
    x_at = x + row[None, :] * x_stride + at[:, None]
    in_rows = (row < rows)[None, :]
    sums = tl.zeros([SOME_OUTPUTS, ROWS], tl.float32)
    ups = tl.zeros([SOME_OUTPUTS, ROWS], tl.float32)
    if BLOCKS:
        ALL: tl.constexpr = (INPUTS + BLOCK_INPUTS - 1) // BLOCK_INPUTS
        block = blocks + tile * ALL
        up_block = block + OUTPUTS // SOME_OUTPUTS * ALL
        scale = tl.load(block + min(split * size // BLOCK_INPUTS, ALL - 1))
        up_scale = scale
        if PAIRED:
            up_scale = tl.load(up_block)
    for start in tl.range(split * size, min(split * size + size, INPUTS), SOME_INPUTS, num_stages=STAGES):
        if INPUTS % SOME_INPUTS == 0:
            left = tl.load(weight_at + start)
            right = tl.load(x_at + start, mask=in_rows, other=0.0)
        else:
            inside = at < INPUTS - start
            left = tl.load(weight_at + start, mask=inside[None, :], other=0.0)
            right = tl.load(x_at + start, mask=in_rows & inside[:, None], other=0.0)
        if BLOCKS:
            next = min((start + SOME_INPUTS) // BLOCK_INPUTS, ALL - 1)
            next_scale = tl.load(block + next)
            if PAIRED:
                next_up_scale = tl.load(up_block + next)
        if SCALED:  # the chip converts to float16 directly, to bfloat16 in three steps; an eighth: float16 ends at 65504
            eighth = 0.125
            if BLOCKS and not PAIRED:
                eighth = 0.125 * scale
            left, right = left.to(HALF), (right.to(tl.float32) * eighth).to(HALF)
        if BLOCKS and PAIRED:
            sums += tl.dot(left, right, input_precision=PRECISION) * scale
        else:
            sums = tl.dot(left, right, sums, input_precision=PRECISION)
        if PAIRED:
            if INPUTS % SOME_INPUTS == 0:
                other = tl.load(weight_at + start + OUTPUTS * INPUTS)
            else:
                other = tl.load(weight_at + start + OUTPUTS * INPUTS, mask=inside[None, :], other=0.0)
            if SCALED:
                other = other.to(HALF)
            if BLOCKS:
                ups += tl.dot(other, right, input_precision=PRECISION) * up_scale
                up_scale = next_up_scale
            else:
                ups = tl.dot(other, right, ups, input_precision=PRECISION)
        if BLOCKS:
            scale = next_scale
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SPLITS > 1:
        place = tl.arange(0, SOME_OUTPUTS)[:, None] * ROWS + row[None, :]
        parts = part_sums + tile * (SPLITS * SOME_OUTPUTS * ROWS) + place
        tl.store(parts + split * (SOME_OUTPUTS * ROWS), sums)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrived + tile, 0)
        sums = tl.load(parts, cache_modifier=".cg")
        for one in tl.static_range(1, SPLITS):
            sums += tl.load(parts + one * (SOME_OUTPUTS * ROWS), cache_modifier=".cg")
    if SCALED:
        sums *= 8.0 * tl.load(scales + output, mask=output < OUTPUTS, other=0.0)[:, None]
        if PAIRED:
            ups *= 8.0 * tl.load(scales + OUTPUTS + output, mask=output < OUTPUTS, other=0.0)[:, None]
    if BIAS:
        sums += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
        if PAIRED:
            ups += tl.load(bias + OUTPUTS + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    if PAIRED:
        sums = gated(sums, ups, ACTIVATION)
    mask = (output < OUTPUTS)[:, None] & in_rows
    place = row[None, :].to(tl.int64) * out_stride + output[:, None]
    if RESIDUAL:
        sums += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=mask)


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    scratch: SkinnyScratch,
    *,
    scales: Scales | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    paired: bool = False,
    activation: Activation = "silu",
    pdl: bool = False,
) -> None:
    """x: [rows, inputs], weight: [outputs, inputs] -> out [rows, outputs]; up to ROWS_MAX rows, FP8_ROWS_MAX with `scales`.

    residual: [rows, outputs] with the rows of `out`, added; may be `out`. paired: the first half of the outputs are gates, the
    second half are multiplied with their activation: out [rows, outputs / 2].
    """
    outputs, inputs = weight.shape
    if paired:
        outputs //= 2
    tiles = cdiv(outputs, SOME_OUTPUTS)
    splits = 1
    while not paired and 2 * splits * tiles <= PROGRAMS and 2 * splits * 4 * SOME_INPUTS <= inputs and splits < SPLITS_MAX:
        splits *= 2
    wide = x.dtype == torch.float32  # tests use such sizes: half the stages fit
    blocks = None if scales is None else scales.blocks
    short = len(x) > 64 or (scales is not None and paired)
    stages = 2 if wide else 3 if short else 4 if len(x) > 32 or inputs <= outputs else 6
    _skinny_gemm[(tiles, splits)](
        *(x, weight, x if scales is None else scales.outputs, x if blocks is None else blocks),
        *(x if bias is None else bias, x if residual is None else residual, out),
        *(scratch.sums, scratch.arrived),
        *(len(x), x.stride(0), out.stride(0)),
        OUTPUTS=outputs,
        INPUTS=inputs,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        PAIRED=paired,
        SPLITS=splits,
        SOME_OUTPUTS=SOME_OUTPUTS,
        SOME_INPUTS=32 if wide else SOME_INPUTS,
        ROWS=max(16, next_power_of_2(len(x))),
        STAGES=stages,
        PRECISION="ieee" if wide else "tf32",
        SCALED=scales is not None,
        BLOCKS=blocks is not None,
        HALF=tl.float32 if wide else tl.float16,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=4 if len(x) <= 64 else 8,
        num_stages=stages,
        launch_pdl=pdl,
    )
