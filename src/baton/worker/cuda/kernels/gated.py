"""The activation between the two products of an MLP: act(gate) * up, where gate and up are the halves of one row.

Kernels with both halves in registers call `gated`. NaN is kept.
"""

import torch
import triton
import triton.language as tl

from baton.models.config import Activation
from baton.worker.cuda.kernels.sizes import cdiv

BLOCK = 1024


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """The activation of models/layers/mlp.py. The hyperbolic tangent of GELU is a sigmoid: (1 + tanh(z)) / 2 = sigmoid(2 z)."""
    if ACTIVATION == "gelu_tanh":
        doubled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-doubled)) * up
    elif ACTIVATION == "swiglu_oai":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _gated_mul(gate_up, out, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, gated(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=inside)


def gated_mul(gate_up: torch.Tensor, out: torch.Tensor, activation: Activation = "silu") -> None:
    """Activate and multiply. gate_up: [rows, 2 * width] -> out [rows, width]."""
    rows, width = out.shape
    _gated_mul[(rows, cdiv(width, BLOCK))](gate_up, out, WIDTH=width, ACTIVATION=activation, BLOCK=BLOCK, num_warps=4)
