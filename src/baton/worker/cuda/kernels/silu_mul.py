"""SwiGLU between the two products of the MLP: silu(gate) * up, where gate and up are the halves of one row."""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import cdiv

BLOCK = 1024


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + at, product.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """gate_up: [rows, 2 * width] -> out [rows, width]."""
    rows, width = out.shape
    _silu_mul[(rows, cdiv(width, BLOCK))](gate_up, out, WIDTH=width, BLOCK=BLOCK, num_warps=4)
