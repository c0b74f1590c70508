"""The norm before a mixture of experts, the router's product and its choice, for one row, in one kernel: launches would cost
more than the work.

Some experts per program; the last arriver looks at all logits and picks. Each picked expert gets a tile of its own (route.py).
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.route import RouteScratch
from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2

EXPERTS_PER_PROGRAM = 4


@triton.jit
def _route_row(
    x, norm, router, logits, normed, picked, shares, members, tiles, arrived, eps,
    WIDTH: tl.constexpr, EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, NORMALISED: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, ALL: tl.constexpr, SOME: tl.constexpr, PROGRAMS: tl.constexpr, LEAST: tl.constexpr,
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
    weight = tl.exp(logit - tl.max(logit, 0))
    share = weight / tl.sum(weight, 0)
    order = (share.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - each).to(tl.int64)
    order = tl.where(each < EXPERTS, order, LEAST)
    total = 0.0
    for one in tl.static_range(PER_TOKEN):
        best = tl.max(order, 0)
        part = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        mine = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        total += part
        order = tl.where(order == best, LEAST, order)
        tl.store(picked + one, mine)
        tl.store(shares + one, part)
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
    *,
    normalised: bool,
) -> int:
    """x: [1, width] -> normed [1, width], and `scratch` as route() fills it; how many tiles there are. logits: float32."""
    experts, width = router.shape
    per_token, programs = scratch.picked.shape[1], cdiv(experts, EXPERTS_PER_PROGRAM)
    _route_row[(programs,)](
        *(
            x,
            norm,
            router,
            logits,
            normed,
            scratch.picked,
            scratch.shares,
            scratch.members,
            scratch.tiles,
            scratch.arrived,
            eps,
        ),
        WIDTH=width,
        EXPERTS=experts,
        PER_TOKEN=per_token,
        NORMALISED=normalised,
        TILE=tile,
        BLOCK=next_power_of_2(width),
        ALL=next_power_of_2(experts),
        SOME=EXPERTS_PER_PROGRAM,
        PROGRAMS=programs,
        LEAST=-(2**63),
        num_warps=4,
    )
    return per_token
