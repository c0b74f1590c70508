"""Assigns rows to experts: the router's logits become tiles of rows that share an expert.

route    a program per row: its shares, the best few experts, and the row's number among the rows of each expert
place    the tiles of every expert are consecutive; every pair (row, expert) gets a place in one

    pair     = row * PER_TOKEN + which of its experts
    members  | pairs of expert 3, up to TILE | more of expert 3 | pairs of expert 9 | ...       TILE places each, some empty
    tiles    |      (3, how many)            |  (3, how many)   |    (9, how many)  | (-1, 0)   as many as there could be

Numbers come from atomic counters, so a row's place differs from run to run; its result does not.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.models.config import Experts
from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2

PAIRS = 64


class RouteScratch:
    """Memory for steps of up to `rows` rows."""

    def __init__(self, rows: int, experts: int, per_token: int, sizes: tuple[int, int], device: torch.device | str) -> None:
        """sizes: rows of the smallest and the largest tile."""
        tile_least, tile_most = sizes
        pairs, tiles = rows * per_token, tiles_most(rows, experts, per_token, tile_least)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.picked, self.numbers = ints(rows, per_token), ints(rows, per_token)
        self.shares = torch.zeros(rows, per_token, dtype=torch.float32, device=device)
        self.counts = ints(experts)
        "Rows per expert; zero between steps (experts.py resets it)."
        self.arrived = ints(1)
        self.tiles = ints(tiles, 2)
        self.members = ints(pairs + experts * tile_most)


def tiles_most(rows: int, experts: int, per_token: int, tile: int) -> int:
    """Maximum of tiles. No expert has more than one tile that is not full, and no tile is empty."""
    pairs = rows * per_token
    return min(pairs, experts + pairs // tile)


class Picking(NamedTuple):
    """Tensors of the choice of experts and shares, beside the settings in config.Experts."""

    experts: Experts
    bias: torch.Tensor | None = None
    "[experts], a bias added to the logits."
    correction: torch.Tensor | None = None
    "[experts], a bias added to the shares for the choice."
    own: range | None = None
    "Experts of this rank: only their pairs are placed. None: all."

    def tensors(self, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors for the kernel. `other` replaces missing ones."""
        return other if self.bias is None else self.bias, other if self.correction is None else self.correction

    def constants(self) -> dict[str, object]:
        experts = self.experts
        own = range(experts.count) if self.own is None else self.own
        return {
            "FIRST": own.start,
            "OWN": len(own),
            "EXPERTS": experts.count,
            "PER_TOKEN": experts.per_token,
            "NORMALISED": experts.normalised,
            "SIGMOID": experts.scoring == "sigmoid",
            "SCALE": experts.scale,
            "BIAS": self.bias is not None,
            "CORRECTED": self.correction is not None,
            "LEAST": -(2**63),
        }


@triton.jit
def shares_of(x, bias, correction, at, EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr,
              CORRECTED: tl.constexpr, LEAST: tl.constexpr):  # fmt: skip
    """Shares of the experts for one row. x: its logits, float32 [BLOCK], -inf after the last expert. Returns the shares, and a
    combined number of share and expert for the choice: larger for a larger share and for the lower of two experts. A NaN row
    still gets different experts."""
    if BIAS:
        x += tl.load(bias + at, mask=at < EXPERTS, other=0.0).to(tl.float32)
    if SIGMOID:
        share = 1.0 / (1.0 + tl.exp(-x))
    else:
        weight = tl.exp(x - tl.max(x, 0))
        share = weight / tl.sum(weight, 0)
    by = share
    if CORRECTED:
        by += tl.load(correction + at, mask=at < EXPERTS, other=0.0).to(tl.float32)
    bits = by.to(tl.int32, bitcast=True)
    if CORRECTED:  # the bits of negative numbers have the reverse order
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)
    return share, tl.where(at < EXPERTS, order, LEAST)


@triton.jit
def pick_next(share, order, at, LEAST: tl.constexpr):
    """The best remaining expert, its share, and the order without it."""
    best = tl.max(order, 0)
    expert = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    part = tl.sum(tl.where(at == expert, share, 0.0), 0)
    return expert, part, tl.where(order == best, LEAST, order)


@triton.jit
def _route(
    logits, slots, bias, correction, picked, shares, numbers, counts,
    EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, NORMALISED: tl.constexpr, SIGMOID: tl.constexpr, SCALE: tl.constexpr,
    BIAS: tl.constexpr, CORRECTED: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, FIRST: tl.constexpr,
    OWN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    here = row * PER_TOKEN
    if tl.load(slots + row) < 0:  # padding: no expert
        for one in tl.static_range(PER_TOKEN):
            tl.store(picked + here + one, -1)
        return
    at = tl.arange(0, BLOCK)
    x = tl.load(logits + row * EXPERTS + at, mask=at < EXPERTS, other=float("-inf"))
    share, order = shares_of(x, bias, correction, at, EXPERTS, SIGMOID, BIAS, CORRECTED, LEAST)
    total = 0.0
    for one in tl.static_range(PER_TOKEN):
        expert, part, order = pick_next(share, order, at, LEAST)
        total += part
        tl.store(shares + here + one, part * SCALE)
        if OWN == EXPERTS:
            tl.store(picked + here + one, expert)
            tl.store(numbers + here + one, tl.atomic_add(counts + expert, 1, sem="relaxed"))
        elif (expert >= FIRST) & (expert < FIRST + OWN):
            tl.store(picked + here + one, expert - FIRST)
            tl.store(numbers + here + one, tl.atomic_add(counts + expert - FIRST, 1, sem="relaxed"))
        else:  # an expert of another rank
            tl.store(picked + here + one, -1)
    if NORMALISED:
        tl.debug_barrier()
        for one in tl.static_range(PER_TOKEN):
            tl.store(shares + here + one, tl.load(shares + here + one) / total)


@triton.jit
def _place(
    picked, numbers, counts, members, tiles, pairs, tile_count,
    EXPERTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Write the places of pairs and tiles, in runs of PAIRS."""
    expert = tl.arange(0, BLOCK)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    needed = (count + TILE - 1) // TILE
    ends = tl.cumsum(needed, 0)
    at = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    mine = tl.load(picked + at, mask=at < pairs, other=-1)
    begins = tl.sum(tl.where(mine[:, None] == expert[None, :], (ends - needed)[None, :], 0), 1)
    number = tl.load(numbers + at, mask=at < pairs, other=0)
    tl.store(members + begins * TILE + number, at, mask=(at < pairs) & (mine >= 0))
    of = tl.sum((ends[None, :] <= at[:, None]).to(tl.int32), 1)
    own = of[:, None] == expert[None, :]
    before = tl.sum(tl.where(own, (ends - needed)[None, :], 0), 1)
    have = tl.sum(tl.where(own, count[None, :], 0), 1)
    filled = tl.minimum(have - (at - before) * TILE, TILE)
    used = of < BLOCK
    tl.store(tiles + at * 2, tl.where(used, of, -1), mask=at < tile_count)
    tl.store(tiles + at * 2 + 1, tl.where(used, filled, 0), mask=at < tile_count)


def route(logits: torch.Tensor, slots: torch.Tensor, scratch: RouteScratch, tile: int, picking: Picking) -> int:
    """Assign rows to experts. logits: float32 [rows, experts]; slots: int32 [rows], -1: padding. Fills `scratch`; returns the
    maximum of tiles."""
    rows, experts = logits.shape
    per_token, block = picking.experts.per_token, next_power_of_2(experts)
    _route[(rows,)](
        *(logits, slots, *picking.tensors(logits), scratch.picked, scratch.shares, scratch.numbers, scratch.counts),
        **picking.constants(),
        BLOCK=block,
        num_warps=1,
    )
    pairs, count = rows * per_token, tiles_most(rows, experts, per_token, tile)
    _place[(cdiv(max(pairs, count), PAIRS),)](
        *(scratch.picked, scratch.numbers, scratch.counts, scratch.members, scratch.tiles, pairs, count),
        EXPERTS=experts,
        TILE=tile,
        BLOCK=block,
        PAIRS=PAIRS,
        num_warps=4,
    )
    return count


@triton.jit
def rows_of_tile(members, tiles, tile, TILE: tl.constexpr, PER_TOKEN: tl.constexpr, GATHER: tl.constexpr):
    """Rows of a tile, for products of experts: its pairs, which places are filled, and each pair's source row: with GATHER of
    the step, else the pair itself."""
    place = tl.arange(0, TILE)
    there = place < tl.load(tiles + tile * 2 + 1)
    pair = tl.load(members + tile * TILE + place, mask=there, other=0)
    source = pair
    if GATHER:
        source = pair // PER_TOKEN
    return pair, there, source
