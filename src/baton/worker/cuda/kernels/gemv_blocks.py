"""Products of one row, as in gemv.py, for fp8 weights with block scales."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.models.config import Activation
from baton.worker.cuda.kernels.fp8 import BLOCK_INPUTS, GROUP, Scales
from baton.worker.cuda.kernels.gated import gated
from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2


class BlockGemvTuning(NamedTuple):
    outputs: int
    "Outputs per program, all of one group (fp8.py)."
    at_once: int
    warps: int
    stages: int


# Measured on an H200 (docs/internals/notes/gpu-kernels.md).
SHORT, LONG, LONG_INPUTS = BlockGemvTuning(8, 2, 4, 3), BlockGemvTuning(16, 2, 8, 3), 8192


@triton.jit
def _gemv_blocks(
    x, norm, weight, scales, blocks, bias, residual, out, eps,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    PAIRED: tl.constexpr, SOME_OUTPUTS: tl.constexpr, AT_ONCE: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    EVEN: tl.constexpr = PADDED == INPUTS and OUTPUTS % SOME_OUTPUTS == 0
    BLOCKS: tl.constexpr = (INPUTS + BLOCK_INPUTS - 1) // BLOCK_INPUTS
    first = tl.program_id(0) * SOME_OUTPUTS
    at = tl.arange(0, PADDED)
    inside = at < INPUTS
    inputs = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(inputs * inputs, 0) / INPUTS + eps)
        inputs *= tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    block = blocks + first // GROUP * BLOCKS + at // BLOCK_INPUTS
    scaled = inputs * tl.load(block, mask=inside, other=0.0)
    up_scaled = scaled
    if PAIRED:
        up_scaled = inputs * tl.load(block + OUTPUTS // GROUP * BLOCKS, mask=inside, other=0.0)
    which = tl.arange(0, SOME_OUTPUTS)
    result = tl.zeros([SOME_OUTPUTS], tl.float32)
    up = tl.zeros([SOME_OUTPUTS], tl.float32)
    for some in tl.range(0, SOME_OUTPUTS, AT_ONCE, num_stages=STAGES):
        place = some + tl.arange(0, AT_ONCE)
        line = weight + (first + place).to(tl.int64)[:, None] * INPUTS + at[None, :]
        there = (first + place < OUTPUTS)[:, None] & inside[None, :]
        if EVEN:
            values = tl.load(line)
        else:
            values = tl.load(line, mask=there, other=0.0)
        if PAIRED:
            if EVEN:
                ups = tl.load(line + OUTPUTS * INPUTS)
            else:
                ups = tl.load(line + OUTPUTS * INPUTS, mask=there, other=0.0)
        here = place[:, None] == which[None, :]
        result += tl.sum(tl.where(here, tl.sum(values.to(tl.float32) * scaled[None, :], 1)[:, None], 0.0), 0)
        if PAIRED:
            up += tl.sum(tl.where(here, tl.sum(ups.to(tl.float32) * up_scaled[None, :], 1)[:, None], 0.0), 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    output = first + which
    real = output < OUTPUTS
    result *= factor * tl.load(scales + output, mask=real, other=0.0)
    if BIAS:
        result += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
    if PAIRED:
        up *= factor * tl.load(scales + OUTPUTS + output, mask=real, other=0.0)
        if BIAS:
            up += tl.load(bias + OUTPUTS + output, mask=real, other=0.0).to(tl.float32)
        result = gated(result, up, ACTIVATION)
    if RESIDUAL:
        result += tl.load(residual + output, mask=real, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=real)


def gemv_blocks(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    scales: Scales,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    paired: bool = False,
    activation: Activation = "silu",
    pdl: bool = False,
) -> None:
    """gemv() with block scales in `scales`."""
    outputs, inputs = weight.shape
    if paired:
        outputs //= 2
    padded = next_power_of_2(inputs)
    tuning = LONG if padded >= LONG_INPUTS else SHORT
    _gemv_blocks[(cdiv(outputs, tuning.outputs),)](
        *(x, x if norm is None else norm, weight, scales.outputs, scales.blocks),
        *(x if bias is None else bias, x if residual is None else residual, out, eps),
        OUTPUTS=outputs,
        INPUTS=inputs,
        NORM=norm is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        PAIRED=paired,
        SOME_OUTPUTS=tuning.outputs,
        AT_ONCE=tuning.at_once,
        PADDED=padded,
        STAGES=tuning.stages,
        GROUP=GROUP,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=tuning.warps,
        launch_pdl=pdl,
    )
