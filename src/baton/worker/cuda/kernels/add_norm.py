"""Residual addition and RMS norm in one pass: residual += added; out = residual / rms(residual) * weight.

A row is one program, so every number is read once. The sum is rounded to the residual's type before it is normalised, as if
the two were separate; the norm is worked out in float32.
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import next_power_of_2


@triton.jit
def _add_norm(
    residual, added, weight, out, rows, eps,
    WIDTH: tl.constexpr, ADD: tl.constexpr, GATHER: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0)
    if GATHER:
        row = tl.load(rows + place).to(tl.int64)
    else:
        row = place.to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(residual + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(added + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(residual.dtype.element_ty)
        if not GATHER:
            tl.store(residual + row * WIDTH + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * scale
    tl.store(out + place.to(tl.int64) * WIDTH + at, normed.to(out.dtype.element_ty), mask=inside)


def add_norm(
    residual: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """residual (in place) and added: [rows, width] -> out [rows, width].

    `rows`: int32 [picked]; only these rows are normalised, into out [picked, width], and the residual is left as it is: for
    the last norm of a step, which only the rows need that get a token.
    """
    width = residual.shape[1]
    count = len(residual) if rows is None else len(rows)
    _add_norm[(count,)](
        residual,
        residual if added is None else added,
        weight,
        out,
        weight if rows is None else rows,
        eps,
        WIDTH=width,
        ADD=added is not None,
        GATHER=rows is not None,
        BLOCK=next_power_of_2(width),
        PDL=pdl,
        num_warps=4 if width <= 2048 else 8,
        launch_pdl=pdl,
    )
