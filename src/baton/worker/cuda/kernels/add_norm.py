"""Residual addition and a norm in one pass: residual += added; out = residual / rms(residual) * weight.

One program per row, so every number is read once. The sum is rounded to the residual's type before it is normalised, as with
separate kernels; norms are computed in float32. Models with norms after attention and MLP normalise `added` first.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import next_power_of_2


class NormWeights(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    centred: bool = False
    "Whether the mean is subtracted first (LayerNorm). Else RMSNorm."


@triton.jit
def normed_row(x, weight, bias, eps, at, inside, WIDTH: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr):
    """One normalised row. x: float32 [BLOCK], 0 outside."""
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / WIDTH, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * scale
    if BIAS:
        x += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _add_norm(
    residual, added, post, post_bias, weight, bias, out, rows, eps,
    WIDTH: tl.constexpr, ADD: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr, GATHER: tl.constexpr,
    CENTRED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
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
    if ADD:
        more = tl.load(added + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        if POST:
            more = normed_row(more, post, post_bias, eps, at, inside, WIDTH, CENTRED, BIAS)
            more = more.to(residual.dtype.element_ty).to(tl.float32)
        x += more
        rounded = x.to(residual.dtype.element_ty)
        if not GATHER:
            tl.store(residual + row * WIDTH + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if NORM:
        normed = normed_row(x, weight, bias, eps, at, inside, WIDTH, CENTRED, BIAS)
        tl.store(out + place.to(tl.int64) * WIDTH + at, normed.to(out.dtype.element_ty), mask=inside)


def add_norm(
    residual: torch.Tensor,
    added: torch.Tensor | None,
    norm: NormWeights | None,
    eps: float,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    post: NormWeights | None = None,
    pdl: bool = False,
) -> None:
    """residual (in place) and added: [rows, width] -> out [rows, width].

    norm: None only adds, and does not write `out`. post: the norm of `added`. `rows`: int32 [picked]; only these rows are
    normalised, into out [picked, width], and the residual is unchanged: for the last norm of a step, which only due rows need.
    """
    width = residual.shape[1]
    one = norm or post or NormWeights(residual)
    first, last = post or one, norm or one
    _add_norm[(len(residual) if rows is None else len(rows),)](
        *(residual, residual if added is None else added),
        *(first.weight, first.weight if first.bias is None else first.bias),
        *(last.weight, last.weight if last.bias is None else last.bias),
        *(out, last.weight if rows is None else rows, eps),
        WIDTH=width,
        ADD=added is not None,
        POST=post is not None,
        NORM=norm is not None,
        GATHER=rows is not None,
        CENTRED=one.centred,
        BIAS=one.bias is not None,
        BLOCK=next_power_of_2(width),
        PDL=pdl,
        num_warps=4 if width <= 2048 else 8,
        launch_pdl=pdl,
    )
