"""The norm before a mixture of experts, the router's product and its choice, for one row, in one kernel: separate launches
would cost more than the work.

Some experts per program; the last arriver reads all logits and picks. Each picked expert gets its own tile (route.py).
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.route import Picking, RouteScratch, pick_next, shares_of
from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2

EXPERTS_PER_PROGRAM = 4


@triton.jit
def _route_row(
    x, norm, router, bias, correction, logits, normed, picked, shares, members, tiles, arrived, eps,
    WIDTH: tl.constexpr, EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, NORMALISED: tl.constexpr, SIGMOID: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, CORRECTED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    ALL: tl.constexpr, SOME: tl.constexpr, PROGRAMS: tl.constexpr, LEAST: tl.constexpr, FIRST: tl.constexpr,
    OWN: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    row = (values * tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps) * scale).to(normed.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(normed + at, row, mask=inside)
    expert = tl.program_id(0) * SOME + tl.arange(0, SOME)
    there = (expert < EXPERTS)[:, None] & inside[None, :]
    lines = tl.load(router + expert[:, None] * WIDTH + at[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(logits + expert, tl.sum(lines * row.to(tl.float32)[None, :], 1), mask=expert < EXPERTS)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") < PROGRAMS - 1:
        return
    tl.store(arrived, 0)
    each = tl.arange(0, ALL)
    logit = tl.load(logits + each, mask=each < EXPERTS, other=float("-inf"), cache_modifier=".cg")
    share, order = shares_of(logit, bias, correction, each, EXPERTS, SIGMOID, BIAS, CORRECTED, LEAST)
    total = 0.0
    for one in tl.static_range(PER_TOKEN):
        mine, part, order = pick_next(share, order, each, LEAST)
        total += part
        tl.store(picked + one, mine)
        tl.store(shares + one, part * SCALE)
        tl.store(members + one * TILE, one)
        tl.store(tiles + one * 2, mine)
        tl.store(tiles + one * 2 + 1, 1)
    if NORMALISED:
        tl.debug_barrier()
        for one in tl.static_range(PER_TOKEN):
            tl.store(shares + one, tl.load(shares + one) / total)


def route_row(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    logits: torch.Tensor,
    normed: torch.Tensor,
    scratch: RouteScratch,
    tile: int,
    picking: Picking,
) -> int:
    """Choose the experts of one row. x: [1, width] -> normed [1, width], and `scratch` as route() fills it; returns the number
    of tiles. logits: float32. For one rank: with several, the sum of the attention comes before this norm."""
    experts, width = router.shape
    programs = cdiv(experts, EXPERTS_PER_PROGRAM)
    _route_row[(programs,)](
        *(
            x,
            norm,
            router,
            *picking.tensors(logits),
            logits,
            normed,
            scratch.picked,
            scratch.shares,
            scratch.members,
            scratch.tiles,
            scratch.arrived,
            eps,
        ),
        **picking.constants(),
        WIDTH=width,
        TILE=tile,
        BLOCK=next_power_of_2(width),
        ALL=next_power_of_2(experts),
        SOME=EXPERTS_PER_PROGRAM,
        PROGRAMS=programs,
        num_warps=4,
    )
    return picking.experts.per_token
