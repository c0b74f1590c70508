"""Sums over the rows of prompts after the last norm, for embeddings (worker/pooling.py).

    rows of a step     | prompt a          | decode | prompt b    |
    ranges             (first, count) of a           of b              -> sums int64 [ranges, width]

A state is rounded to a multiple of 2^-24 and summed as an integer, as on a CPU: integers may be added in any order, so the sum
has the same bits however a prompt was divided into steps, if its rows have.
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.add_norm import NormWeights
from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2

COLUMNS, ROWS = 128, 32


@triton.jit
def _row_scales(
    residual, added, scales, means, eps, WIDTH: tl.constexpr, ADD: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(residual + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(added + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        x = x.to(residual.dtype.element_ty).to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 0) / WIDTH
        tl.store(means + row, mean)
        x = tl.where(at < WIDTH, x - mean, 0.0)
    tl.store(scales + row, tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps))


@triton.jit
def _pool_rows(
    residual, added, scales, means, norm, bias, ranges, sums, steps_per_one, largest,
    WIDTH: tl.constexpr, ADD: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < WIDTH
    first = tl.load(ranges + 2 * which)
    end = first + tl.load(ranges + 2 * which + 1)
    gains = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([COLUMNS], tl.int64)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * WIDTH + at[None, :]
        x = tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            x += tl.load(added + place, mask=mask, other=0.0).to(tl.float32)
            x = x.to(residual.dtype.element_ty).to(tl.float32)
        if CENTRED:
            x -= tl.load(means + row, mask=row < end, other=0.0)[:, None]
        x = x * tl.load(scales + row, mask=row < end, other=0.0)[:, None] * gains[None, :]
        if BIAS:
            x = tl.where(mask, x + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[None, :], 0.0)
        steps = tl.floor(tl.minimum(tl.maximum(x, -largest), largest) * steps_per_one + 0.5)
        total += tl.sum(steps.to(tl.int64), 0)
    tl.store(sums + which.to(tl.int64) * WIDTH + at, total, mask=inside)


def pool_rows(
    residual: torch.Tensor,
    added: torch.Tensor | None,
    norm: NormWeights,
    eps: float,
    ranges: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor,
    *,
    steps_per_one: float,
    largest: float,
) -> None:
    """residual + added: [rows, width]; ranges: int32 [ranges, 2], first row and count -> sums int64 [ranges, width].

    scales: float32 [2, rows or more], of the norm; overwritten. largest: states are clipped there.
    """
    rows, width = residual.shape
    other = residual if added is None else added
    _row_scales[(rows,)](
        *(residual, other, *scales, eps),
        WIDTH=width,
        ADD=added is not None,
        CENTRED=norm.centred,
        BLOCK=next_power_of_2(width),
        num_warps=4,
    )
    _pool_rows[(len(ranges), cdiv(width, COLUMNS))](
        *(residual, other, *scales, norm.weight, norm.weight if norm.bias is None else norm.bias),
        *(ranges, sums, steps_per_one, largest),
        WIDTH=width,
        ADD=added is not None,
        CENTRED=norm.centred,
        BIAS=norm.bias is not None,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
