"""Tokens drawn on the device, as worker/draws.py draws them: a function of (seed, index, position) and of the row's logits.

argmax.py has run: likeliest tokens, largest logits and the judgement of every row are there, and rows without a temperature are
done. Of the others, `_draw` (many programs per row) sums the weights and

  plain      looks the uniform number up in the running sum by token id: chunk first, then inside the chunk
  limited    (top-k, top-p, min-p) writes down the few candidates that may pass; `_pick` bisects for the limits among them

A row that has more candidates than CANDIDATES (a flat distribution) is picked by `_pick_from_all`, which reads the logits
again for every pair of bits: slow, but right.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.argmax import CHUNK, SMALL, ArgmaxScratch
from baton.worker.cuda.kernels.draw_math import order_bits, share_of, uniform, units, weigh
from baton.worker.cuda.kernels.pick_from_all import pick_from_all

CANDIDATES = 8192
TEMPERATURE_LEAST = 1e-30


class SamplingColumns(NamedTuple):
    """By slot: written when a sequence gets its slot."""

    temperature: torch.Tensor
    "float32; 0 for the likeliest."
    top_k: torch.Tensor
    "int32; 0 for all."
    top_p: torch.Tensor
    "float64."
    min_p: torch.Tensor
    "float64."
    seed: torch.Tensor
    "int64: the bits of the uint64."
    sequence_index: torch.Tensor
    "int32: which of the n sequences of its request."

    @staticmethod
    def empty(slots: int, device: torch.device | str) -> "SamplingColumns":
        """All of them greedy."""

        def column(dtype: torch.dtype, value: float = 0) -> torch.Tensor:
            return torch.full((slots,), value, dtype=dtype, device=device)

        return SamplingColumns(
            column(torch.float32),
            column(torch.int32),
            column(torch.float64, 1.0),
            column(torch.float64),
            column(torch.int64),
            column(torch.int32),
        )


class SampleScratch:
    def __init__(self, rows: int, vocabulary: int, device: torch.device | str) -> None:
        self.parts = triton.cdiv(vocabulary, CHUNK)
        self.argmax = ArgmaxScratch(rows, vocabulary, device)
        self.sums = torch.empty(rows, self.parts, dtype=torch.int64, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)
        self.weights = torch.empty(rows, CANDIDATES, dtype=torch.float32, device=device)
        self.ids = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=device)


@triton.jit
def _draw(
    logits, slots, positions, tokens, last_tokens, temperatures, top_ks, top_ps, min_ps, seeds, indices,
    peaks, small_best, sums, counts, arrived, candidate_weights, candidate_ids,
    row_stride, vocabulary, parts, TEMPERATURE_LEAST: tl.constexpr, CANDIDATES: tl.constexpr,
    MANY: tl.constexpr, MANY_SMALL: tl.constexpr, CHUNK: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    temperature = tl.load(temperatures + slot)
    if (temperature < TEMPERATURE_LEAST) | (tl.load(tokens + row) < 0):
        return
    top_k, top_p, min_p = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
    limited = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    peak = tl.load(peaks + row)
    here = logits + row.to(tl.int64) * row_stride
    at = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(here + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    weight = weigh(x, peak, temperature)
    tl.store(sums + row * parts + part, tl.sum(units(weight), 0))
    if limited:
        least = min_p.to(tl.float32)
        if (top_k == 0) & (min_p == 0.0):
            # Tokens below this weigh less than 1 - top_p together, and all weigh at least 1: none of them can be in.
            least = (0.999 * (1.0 - top_p) / vocabulary).to(tl.float32)
        if (top_k > 0) & (top_k <= MANY_SMALL):
            each = tl.arange(0, MANY_SMALL)
            smalls = parts * (CHUNK // SMALL)
            best = tl.load(small_best + row * smalls + each, mask=each < smalls, other=float("-inf"))
            kth = tl.sum(tl.where(each == top_k - 1, tl.sort(best, descending=True), 0.0), 0)
            least = tl.maximum(least, weigh(kth, peak, temperature))
        passes = (weight >= least) & (at < vocabulary)
        before = tl.cumsum(passes.to(tl.int32), 0) - 1
        count = tl.sum(passes.to(tl.int32), 0)
        if count > 0:
            place = tl.atomic_add(counts + row, count, sem="relaxed") + before
            keep = passes & (place < CANDIDATES)
            tl.store(candidate_weights + row * CANDIDATES + place, weight, mask=keep)
            tl.store(candidate_ids + row * CANDIDATES + place, at, mask=keep)
        return
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") < parts - 1:
        return
    tl.store(arrived + row, 0)
    each = tl.arange(0, MANY)
    of_parts = tl.load(sums + row * parts + each, mask=each < parts, other=0, cache_modifier=".cg")
    part_ends = tl.cumsum(of_parts, 0)
    position = tl.load(positions + row)
    target = share_of(uniform(tl.load(seeds + slot), tl.load(indices + slot), position), tl.sum(of_parts, 0))
    chosen = tl.sum((part_ends <= target).to(tl.int32), 0)
    before_part = tl.sum(tl.where(each < chosen, of_parts, 0), 0)
    at = chosen * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(here + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    ends = before_part + tl.cumsum(units(weigh(x, peak, temperature)), 0)
    token = chosen * CHUNK + tl.sum((ends <= target).to(tl.int32), 0)
    tl.store(tokens + row, token)
    tl.store(last_tokens + slot, token)


@triton.jit
def _largest_limit(bits, amount, goal):
    """The largest bits such that the candidates which reach them have at least `goal` together; 0 where none has."""
    TOP: tl.constexpr = 1 << 29  # weights are at most 1: 0x3F800000
    found = 0
    for step in range(30):
        higher = found | (TOP >> step)
        found = tl.where(tl.sum(tl.where(bits >= higher, amount, 0), 0) >= goal, higher, found)
    return found


@triton.jit
def _pick(
    slots, positions, tokens, last_tokens, temperatures, top_ks, top_ps, min_ps, seeds, indices,
    sums, counts, candidate_weights, candidate_ids, parts, vocabulary, CANDIDATES: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    count = tl.load(counts + row)
    if (count == 0) | (count > CANDIDATES):  # not a limited row, or one for pick_from_all
        return
    tl.store(counts + row, 0)
    top_k, top_p, min_p = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
    at = tl.arange(0, CANDIDATES)
    weight = tl.load(candidate_weights + row * CANDIDATES + at, mask=at < count, other=0.0)
    ids = tl.load(candidate_ids + row * CANDIDATES + at, mask=at < count, other=2147483647)
    bits = tl.where(at < count, order_bits(weight), -1)
    least = order_bits(min_p.to(tl.float32))
    if (top_k > 0) & (top_k < vocabulary):
        least = tl.maximum(least, _largest_limit(bits, (at < count).to(tl.int32), top_k))
    amount = tl.where(bits >= least, units(weight), 0)
    mass = tl.sum(amount, 0)
    if top_p < 1.0:
        if least == 0:  # only top-p: its share is one of all tokens, also of those that were never candidates
            each = tl.arange(0, MANY)
            mass = tl.sum(tl.load(sums + row * parts + each, mask=each < parts, other=0), 0)
        # A token is in if those before it do not reach top_p yet. Of equal weights the lower ids come first.
        goal = tl.maximum(share_of(top_p, mass), 1)
        last = _largest_limit(bits, amount, goal)
        above = tl.sum(tl.where(bits > last, amount, 0), 0)
        each_tie = tl.max(tl.where(bits == last, amount, 0), 0)
        mass = above + tl.cdiv(goal - above, tl.maximum(each_tie, 1)) * each_tie
    target = share_of(uniform(tl.load(seeds + slot), tl.load(indices + slot), tl.load(positions + row)), mass)
    chosen = _largest_limit(bits, amount, target + 1)
    above = tl.sum(tl.where(bits > chosen, amount, 0), 0)
    equal = bits == chosen
    skip = ((target - above) // tl.maximum(tl.max(tl.where(equal, amount, 0), 0), 1)).to(tl.int32)
    token = tl.min(tl.where(equal, ids, 2147483647), 0)
    if skip > 0:  # the largest id with no more than `skip` of the equal ones before it
        token = 0
        for step in range(20):
            higher = token | (524288 >> step)
            token = tl.where(tl.sum((equal & (ids < higher)).to(tl.int32), 0) <= skip, higher, token)
    tl.store(tokens + row, token)
    tl.store(last_tokens + slot, token)


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: SamplingColumns,
    scratch: SampleScratch,
    tokens: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """After argmax, with the same arguments: rows whose slot has a temperature get a drawn token instead.

    positions: int32 [rows], how many tokens of the output came before.
    """
    rows, vocabulary = logits.shape
    kept, parts = scratch.argmax, scratch.parts
    _draw[(rows, parts)](
        *(logits, slots, positions, tokens, last_tokens, *columns),
        *(kept.peaks, kept.small_best, scratch.sums, scratch.counts, scratch.arrived, scratch.weights, scratch.ids),
        *(logits.stride(0), vocabulary, parts),
        TEMPERATURE_LEAST=TEMPERATURE_LEAST,
        CANDIDATES=CANDIDATES,
        MANY=triton.next_power_of_2(parts),
        MANY_SMALL=min(512, triton.next_power_of_2(parts * (CHUNK // SMALL))),
        CHUNK=CHUNK,
        SMALL=SMALL,
        num_warps=8,
    )
    _pick[(rows,)](
        *(slots, positions, tokens, last_tokens, *columns),
        *(scratch.sums, scratch.counts, scratch.weights, scratch.ids, parts, vocabulary),
        CANDIDATES=CANDIDATES,
        MANY=triton.next_power_of_2(parts),
        num_warps=8,
    )
    pick_from_all(logits, slots, positions, columns, kept.peaks, scratch.counts, tokens, last_tokens, CANDIDATES)
