"""Finds rows of hidden states with NaN or infinity: their keys and values in the pool must not be used."""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import next_power_of_2


@triton.jit
def _judge(residual, added, broken, WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(residual + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(added + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    tl.store(broken + row, tl.max(((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32), 0))


def mark_not_finite(residual: torch.Tensor, added: torch.Tensor | None, broken: torch.Tensor) -> None:
    """residual + added: [rows, width] -> broken int32 [rows], 1 for rows that are not finite."""
    rows, width = residual.shape
    _judge[(rows,)](
        *(residual, residual if added is None else added, broken),
        WIDTH=width,
        ADD=added is not None,
        BLOCK=next_power_of_2(width),
        num_warps=4,
    )
