"""Draws within limits, as top_k.py's `pick`, for rows with more candidates than fit into registers: flat distributions, or a
large top-k.

One program per row reads the row's logits once for every two bits of a limit. Slow (a millisecond), with the same result.
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.draw_math import order_bits, share_of, uniform, units, weigh

BLOCK = 8192


@triton.jit
def _at_least(here, vocabulary, peak, temperature, least, one, two, three, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Units (or the number) of tokens whose bits reach `least` and each of three limits."""
    first = tl.zeros([BLOCK], tl.int64)
    second = tl.zeros([BLOCK], tl.int64)
    third = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(here + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        weight = weigh(x, peak, temperature)
        bits = tl.where(at < vocabulary, order_bits(weight), -1)
        if COUNT:
            amount = (bits >= least).to(tl.int64)
        else:
            amount = tl.where(bits >= least, units(weight), 0)
        first += tl.where(bits >= one, amount, 0)
        second += tl.where(bits >= two, amount, 0)
        third += tl.where(bits >= three, amount, 0)
    return tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)


@triton.jit
def _largest_limit(here, vocabulary, peak, temperature, least, goal, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest bits such that the tokens which reach them have at least `goal` together; 0 if none has."""
    found = 0
    for step in range(15):
        bit = 28 - 2 * step
        one, two, three = found | (1 << bit), found | (2 << bit), found | (3 << bit)
        first, second, third = _at_least(here, vocabulary, peak, temperature, least, one, two, three, COUNT, BLOCK)
        found = tl.where(third >= goal, three, tl.where(second >= goal, two, tl.where(first >= goal, one, found)))
    return found


@triton.jit
def _kth_of_equals(here, vocabulary, peak, temperature, bits_of_equals, skip, BLOCK: tl.constexpr):
    """The id of the token with these bits that has `skip` others before it."""
    found = -1
    before = skip * 0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(here + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        equal = (at < vocabulary) & (order_bits(weigh(x, peak, temperature)) == bits_of_equals)
        number = before + tl.cumsum(equal.to(tl.int32), 0) - 1
        found = tl.maximum(found, tl.max(tl.where(equal & (number == skip), at, -1), 0))
        before += tl.sum(equal.to(tl.int32), 0)
    return found


@triton.jit
def _pick_from_all(
    logits, slots, positions, tokens, last_tokens, temperatures, top_ks, top_ps, min_ps, seeds, indices, peaks, counts,
    row_stride, vocabulary, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    if tl.load(counts + row) <= CANDIDATES:
        return
    tl.store(counts + row, 0)
    temperature, peak = tl.load(temperatures + slot), tl.load(peaks + row)
    top_k, top_p, min_p = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
    here = logits + row.to(tl.int64) * row_stride
    least = order_bits(min_p.to(tl.float32))
    if (top_k > 0) & (top_k < vocabulary):
        kth = _largest_limit(here, vocabulary, peak, temperature, 0, top_k.to(tl.int64), True, BLOCK)
        least = tl.maximum(least, kth)
    mass, _, _ = _at_least(here, vocabulary, peak, temperature, least, 0, 0, 0, False, BLOCK)
    if top_p < 1.0:
        goal = tl.maximum(share_of(top_p, mass), 1)
        last = _largest_limit(here, vocabulary, peak, temperature, least, goal, False, BLOCK)
        above, with_ties, _ = _at_least(here, vocabulary, peak, temperature, least, last + 1, last, last, False, BLOCK)
        each_tie = tl.maximum(units(last.to(tl.float32, bitcast=True)), 1)
        mass = tl.minimum(above + tl.cdiv(goal - above, each_tie) * each_tie, with_ties)
    target = share_of(uniform(tl.load(seeds + slot), tl.load(indices + slot), tl.load(positions + row)), mass)
    chosen = _largest_limit(here, vocabulary, peak, temperature, least, target + 1, False, BLOCK)
    above, _, _ = _at_least(here, vocabulary, peak, temperature, least, chosen + 1, chosen, chosen, False, BLOCK)
    skip = ((target - above) // tl.maximum(units(chosen.to(tl.float32, bitcast=True)), 1)).to(tl.int32)
    token = _kth_of_equals(here, vocabulary, peak, temperature, chosen, skip, BLOCK)
    tl.store(tokens + row, token)
    tl.store(last_tokens + slot, token)


def pick_from_all(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: tuple[torch.Tensor, ...],
    peaks: torch.Tensor,
    counts: torch.Tensor,
    tokens: torch.Tensor,
    last_tokens: torch.Tensor,
    candidates: int,
) -> None:
    """Processes rows whose count is above `candidates`, and resets the count."""
    rows, vocabulary = logits.shape
    _pick_from_all[(rows,)](
        *(logits, slots, positions, tokens, last_tokens, *columns, peaks, counts, logits.stride(0), vocabulary),
        CANDIDATES=candidates,
        BLOCK=BLOCK,
        num_warps=16,
    )
