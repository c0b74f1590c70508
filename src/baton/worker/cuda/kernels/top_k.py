"""Draws within limits (top-k, top-p, min-p): `collect` stores the candidates of a row, `pick` finds the limits among them.
Candidates are all tokens that may pass, and few others. Their lower bounds:

min-p    itself
top-k    the k-th largest of the largest logits of every SMALL tokens (argmax.py): the k-th largest of all is no smaller
top-p    a power of two: all tokens below it have less than 1 - top_p of the mass (by the masses per size, from sample.py)
"""

import triton
import triton.language as tl

from baton.worker.cuda.kernels.draw_math import order_bits, share_of, uniform, units, weigh

BINS = 16
"""Size classes of weights: bin b begins at 2^-(2b + 1) and ends where b - 1 begins; the last one begins at 0."""


@triton.jit
def mass_by_size(weight, bins, BINS: tl.constexpr):
    """Mass per bin of one program's weights, in float32: good for a bound with a margin."""
    size = tl.minimum((127 - (order_bits(weight) >> 23)) >> 1, BINS - 1)
    for one in range(BINS):
        tl.store(bins + one, tl.sum(tl.where(size == one, weight, 0.0), 0))


@triton.jit
def _least_by_mass(bins, parts, top_p, MANY: tl.constexpr, BINS: tl.constexpr):
    """A weight below which all tokens together have less than 1 - top_p of the mass."""
    part, size = tl.arange(0, MANY)[:, None], tl.arange(0, BINS)
    mass = tl.sum(tl.load(bins + part * BINS + size[None, :], mask=part < parts, other=0.0), 0)
    smaller = tl.sum(tl.where(size[:, None] > size[None, :], mass[:, None], 0.0), 0)  # mass of all smaller weights, per size
    small = smaller < 0.999 * (1.0 - top_p) * tl.sum(mass, 0)
    smallest_kept = BINS - tl.sum(small.to(tl.int32), 0)
    return tl.where(smallest_kept < BINS - 1, tl.exp2(-(2.0 * smallest_kept + 1.0)), 0.0)


@triton.jit
def collect(
    logits, slots, tokens, temperatures, top_ks, top_ps, min_ps, peaks, small_best, bins,
    counts, candidate_weights, candidate_ids, row_stride, vocabulary, parts,
    TEMPERATURE_LEAST: tl.constexpr, CANDIDATES: tl.constexpr, MANY: tl.constexpr, MANY_SMALL: tl.constexpr,
    BINS: tl.constexpr, CHUNK: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    temperature = tl.load(temperatures + slot)
    if (temperature < TEMPERATURE_LEAST) | (tl.load(tokens + row) < 0):
        return
    top_k, top_p, min_p = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
    if (top_k == 0) & (top_p >= 1.0) & (min_p == 0.0):
        return
    peak = tl.load(peaks + row)
    least = min_p.to(tl.float32)
    if (top_k == 0) & (min_p == 0.0):
        least = _least_by_mass(bins + row * parts * BINS, parts, top_p, MANY, BINS)
    if (top_k > 0) & (top_k <= MANY_SMALL):
        each = tl.arange(0, MANY_SMALL)
        smalls = parts * (CHUNK // SMALL)
        best = tl.load(small_best + row * smalls + each, mask=each < smalls, other=float("-inf"))
        kth = tl.sum(tl.where(each == top_k - 1, tl.sort(best, descending=True), 0.0), 0)
        least = tl.maximum(least, weigh(kth, peak, temperature))
    at = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    weight = weigh(x, peak, temperature)
    # Tokens without weight are never drawn. If most tokens are excluded, this alone keeps the candidates few.
    passes = (weight >= least) & (weight > 0.0) & (at < vocabulary)
    count = tl.sum(passes.to(tl.int32), 0)
    if count > 0:
        place = tl.atomic_add(counts + row, count, sem="relaxed") + tl.cumsum(passes.to(tl.int32), 0) - 1
        keep = passes & (place < CANDIDATES)
        tl.store(candidate_weights + row * CANDIDATES + place, weight, mask=keep)
        tl.store(candidate_ids + row * CANDIDATES + place, at, mask=keep)


@triton.jit
def _largest_limit(bits, amount, goal):
    """The largest bits such that the candidates which reach them have at least `goal` together; 0 if none has."""
    TOP: tl.constexpr = 1 << 29  # weights are at most 1: 0x3F800000
    found = 0
    for step in range(30):
        higher = found | (TOP >> step)
        found = tl.where(tl.sum(tl.where(bits >= higher, amount, 0), 0) >= goal, higher, found)
    return found


@triton.jit
def pick(
    slots, positions, tokens, last_tokens, temperatures, top_ks, top_ps, min_ps, seeds, indices,
    sums, counts, candidate_weights, candidate_ids, parts, vocabulary, CANDIDATES: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    count = tl.load(counts + row)
    if (count == 0) | (count > CANDIDATES):  # no limits, or a row for full_vocab_sample.py
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
        if least == 0:  # With top-p alone the share refers to all tokens, also those that are not candidates.
            each = tl.arange(0, MANY)
            mass = tl.sum(tl.load(sums + row * parts + each, mask=each < parts, other=0), 0)
        # A token is included if those before it do not reach top_p. Of equal weights the lower ids come first.
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
    if skip > 0:  # the largest id with at most `skip` of the equal ones before it
        token = 0
        for step in range(20):
            higher = token | (524288 >> step)
            token = tl.where(tl.sum((equal & (ids < higher)).to(tl.int32), 0) <= skip, higher, token)
    tl.store(tokens + row, token)
    tl.store(last_tokens + slot, token)
