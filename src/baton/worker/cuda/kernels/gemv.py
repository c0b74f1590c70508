"""Products of one row, fused with the operations before and after them in a decoder layer: the whole layer is six kernels.

    norm -> qkv          norm -> gate, up -> act(gate) * up           norm -> head          attention -> o -> + residual

A batch of one reads every weight once and computes almost nothing: memory is the limit, and each saved launch counts. A program
has a few rows of the matrix; sums are float32 and not split, so results have the same bits on every run. Every program computes
the norm of x itself: its factor is applied at the end, sum(w * x * scale) / rms(x).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.models.config import Activation
from baton.worker.cuda.kernels.fp8 import Scales
from baton.worker.cuda.kernels.gated import gated
from baton.worker.cuda.kernels.gemv_blocks import gemv_blocks
from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2


class GemvTuning(NamedTuple):
    outputs: int
    inputs: int
    warps: int
    stages: int


# Measured on an H200 (docs/internals/notes/gpu-kernels.md): the best tuning depends on the number of outputs.
WIDE, TALL, NARROW, PAIRED = (
    GemvTuning(4, 2048, 4, 3),
    GemvTuning(16, 256, 4, 6),
    GemvTuning(8, 512, 4, 3),
    GemvTuning(4, 512, 2, 6),
)


def gemv_tuning(outputs: int, inputs: int, *, paired: bool) -> GemvTuning:
    if paired:
        return PAIRED
    if outputs >= 32768:
        return WIDE
    return NARROW if outputs == inputs else TALL


def fp8_tuning(outputs: int, inputs: int, *, paired: bool) -> GemvTuning:
    if paired:
        return GemvTuning(8, 256, 2, 6)
    return GemvTuning(8, 512, 4, 6) if inputs > outputs else GemvTuning(16, 512, 4, 4)


@triton.jit
def _gemv(
    x, norm, weight, scales, bias, residual, out, eps,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    PAIRED: tl.constexpr, SOME_OUTPUTS: tl.constexpr, SOME_INPUTS: tl.constexpr, STAGES: tl.constexpr,
    SCALED: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    output = tl.program_id(0) * SOME_OUTPUTS + tl.arange(0, SOME_OUTPUTS)
    EVEN: tl.constexpr = INPUTS % SOME_INPUTS == 0 and OUTPUTS % SOME_OUTPUTS == 0
    line = weight + output.to(tl.int64)[:, None] * INPUTS
    sums = tl.zeros([SOME_OUTPUTS, SOME_INPUTS], tl.float32)
    up_sums = tl.zeros([SOME_OUTPUTS, SOME_INPUTS], tl.float32)
    squares = tl.zeros([SOME_INPUTS], tl.float32)
    for start in tl.range(0, INPUTS, SOME_INPUTS, num_stages=STAGES):
        at = start + tl.arange(0, SOME_INPUTS)
        if EVEN:
            values = tl.load(line + at[None, :])
            inputs = tl.load(x + at).to(tl.float32)
        else:
            inside = (output < OUTPUTS)[:, None] & (at < INPUTS)[None, :]
            values = tl.load(line + at[None, :], mask=inside, other=0.0)
            inputs = tl.load(x + at, mask=at < INPUTS, other=0.0).to(tl.float32)
        if NORM:
            squares += inputs * inputs
            inputs *= tl.load(norm + at, mask=at < INPUTS, other=0.0).to(tl.float32)
        sums += values.to(tl.float32) * inputs[None, :]
        if PAIRED:
            if EVEN:
                ups = tl.load(line + OUTPUTS * INPUTS + at[None, :])
            else:
                ups = tl.load(line + OUTPUTS * INPUTS + at[None, :], mask=inside, other=0.0)
            up_sums += ups.to(tl.float32) * inputs[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    result, up = tl.sum(sums, 1), tl.sum(up_sums, 1)
    if SCALED:
        result *= tl.load(scales + output, mask=output < OUTPUTS, other=0.0)
        if PAIRED:
            up *= tl.load(scales + OUTPUTS + output, mask=output < OUTPUTS, other=0.0)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
        result *= factor
        up *= factor
    if BIAS:
        result += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)
        if PAIRED:
            up += tl.load(bias + OUTPUTS + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)
    if PAIRED:
        result = gated(result, up, ACTIVATION)
    if RESIDUAL:
        result += tl.load(residual + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=output < OUTPUTS)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    scales: Scales | None = None,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    paired: bool = False,
    activation: Activation = "silu",
    tuning: GemvTuning | None = None,
    pdl: bool = False,
) -> None:
    """x: [1, inputs], weight: [outputs, inputs] -> out [1, outputs]. scales: with fp8 (fp8.py).

    norm: weights of the RMS norm of x. residual: [1, outputs], added; may be `out`. paired: the first half of the outputs are
    gates, the second half are multiplied with their activation: out [1, outputs / 2].
    """
    if scales is not None and scales.blocks is not None:
        gemv_blocks(
            *(x, weight, out, scales),
            bias=bias,
            norm=norm,
            eps=eps,
            residual=residual,
            paired=paired,
            activation=activation,
            pdl=pdl,
        )
        return
    outputs, inputs = weight.shape
    if paired:
        outputs //= 2
    if tuning is None:
        tuning = gemv_tuning(outputs, inputs, paired=paired) if scales is None else fp8_tuning(outputs, inputs, paired=paired)
    some_outputs, some_inputs, warps, stages = tuning
    some_inputs = min(some_inputs, next_power_of_2(inputs))
    _gemv[(cdiv(outputs, some_outputs),)](
        *(x, x if norm is None else norm, weight, x if scales is None else scales.outputs),
        *(x if bias is None else bias, x if residual is None else residual, out, eps),
        OUTPUTS=outputs,
        INPUTS=inputs,
        NORM=norm is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        PAIRED=paired,
        SOME_OUTPUTS=some_outputs,
        SOME_INPUTS=some_inputs,
        STAGES=stages,
        SCALED=scales is not None,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
