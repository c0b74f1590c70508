"""A shared expert with a gate (Qwen2-MoE): out += sigmoid(x . gate) * shared. One program per row."""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import next_power_of_2


@triton.jit
def _add_gated(x, gate, shared, out, WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):
    here = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < WIDTH
    values = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(gate + tl.arange(0, BLOCK), mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-tl.sum(values * weights, 0)))
    answer = tl.load(shared + here, mask=inside, other=0.0).to(tl.float32) * share
    if ADD:
        answer += tl.load(out + here, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + here, answer.to(out.dtype.element_ty), mask=inside)


def add_gated(x: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Add the gated output. x, shared: [rows, hidden]; gate: [1, hidden] -> out [rows, hidden], written or added to."""
    rows, width = x.shape
    _add_gated[(rows,)](x, gate, shared, out, WIDTH=width, ADD=add, BLOCK=next_power_of_2(width), num_warps=4)
