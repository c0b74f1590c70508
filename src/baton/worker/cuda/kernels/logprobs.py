"""Log-probability and rank of a token, and the likeliest tokens.

worker/logprobs.py defines them. Many programs per row, CHUNK logits each: the mass, the number of logits larger than the
token's, and the best of the chunk. The last arriver combines them. The best are found by repeatedly taking the largest of a
combined number: the bits of the logit, which have the order of the floats, and below them the id, so equal ones come by id.
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2

CHUNK = 4096
TOP = 20
"""Maximum of top log-probabilities (SamplingParams.logprobs)."""
WORDS = 2 + 2 * TOP
"""Words per row: log-probability (bits of a float32), rank, then id and log-probability of the likeliest."""


class LogprobScratch:
    def __init__(self, rows: int, vocabulary: int, device: torch.device | str) -> None:
        parts = cdiv(vocabulary, CHUNK)
        self.peaks = torch.empty(rows, parts, dtype=torch.float32, device=device)
        self.sums = torch.empty(rows, parts, dtype=torch.float64, device=device)
        self.larger = torch.empty(rows, parts, dtype=torch.int32, device=device)
        self.best = torch.empty(rows, parts * TOP, dtype=torch.int64, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)


@triton.jit
def _order(x, ids):
    """One number for a logit and its id. It is larger for a larger logit, and for the lower of two ids."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # 0.0 instead of -0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _logit(order):
    bits = (order >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _write_logprobs(
    logits, raw, adjusted, slots, tokens, top_logprobs, out, peaks, sums, larger, best, arrived,
    row_stride, raw_stride, vocabulary, parts,
    LEAST: tl.constexpr, TOP: tl.constexpr, WORDS: tl.constexpr, MANY: tl.constexpr, MANY_BEST: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    top = tl.load(top_logprobs + slot)
    token = tl.load(tokens + row)
    if (top < 0) | (token < 0):  # not requested, or the row has failed
        return
    here = logits + row.to(tl.int64) * row_stride
    if tl.load(adjusted + row) != 0:
        here = raw + row.to(tl.int64) * raw_stride
    own = tl.load(here + token)
    at = part * CHUNK + tl.arange(0, CHUNK)
    inside = at < vocabulary
    x = tl.load(here + at, mask=inside, other=float("-inf"))
    peak = tl.max(x, 0)
    tl.store(peaks + row * parts + part, peak)
    tl.store(sums + row * parts + part, tl.sum(tl.exp(x - peak).to(tl.float64), 0))
    tl.store(larger + row * parts + part, tl.sum((x > own).to(tl.int32), 0))
    order = tl.where(inside, _order(x, at), LEAST)
    for place in range(top):
        found = tl.max(order, 0)
        tl.store(best + (row * parts + part) * TOP + place, found)
        order = tl.where(order == found, LEAST, order)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") < parts - 1:
        return
    tl.store(arrived + row, 0)
    each = tl.arange(0, MANY)
    of_parts = tl.load(peaks + row * parts + each, mask=each < parts, other=float("-inf"), cache_modifier=".cg")
    peak = tl.max(of_parts, 0)
    masses = tl.load(sums + row * parts + each, mask=each < parts, other=0.0, cache_modifier=".cg")
    mass = tl.sum(masses * tl.exp(of_parts - peak).to(tl.float64), 0)
    log_mass = tl.log(mass).to(tl.float32)
    ranked = tl.load(larger + row * parts + each, mask=each < parts, other=0, cache_modifier=".cg")
    words = out + row * WORDS
    tl.store(words, (own - peak - log_mass).to(tl.int32, bitcast=True))
    tl.store(words + 1, tl.sum(ranked, 0) + 1)
    each = tl.arange(0, MANY_BEST)
    found_there = (each < parts * TOP) & (each % TOP < top)
    order = tl.load(best + row * parts * TOP + each, mask=found_there, other=LEAST, cache_modifier=".cg")
    for place in range(top):
        found = tl.max(order, 0)
        tl.store(words + 2 + 2 * place, 0x7FFFFFFF - (found & 0x7FFFFFFF).to(tl.int32))
        tl.store(words + 3 + 2 * place, (_logit(found) - peak - log_mass).to(tl.int32, bitcast=True))
        order = tl.where(order == found, LEAST, order)


def write_logprobs(
    logits: torch.Tensor,
    raw: torch.Tensor,
    adjusted: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    top_logprobs: torch.Tensor,
    scratch: LogprobScratch,
    out: torch.Tensor,
) -> None:
    """Write the log-probabilities of rows. logits, raw: float32 [rows, vocabulary]: raw is used where adjusted int32 [rows] is
    set. tokens: int32 [rows]; negative ones are skipped. top_logprobs: AdjustColumns.top_logprobs -> out int32 [rows,
    WORDS]."""
    rows, vocabulary = logits.shape
    parts = cdiv(vocabulary, CHUNK)
    _write_logprobs[(rows, parts)](
        *(logits, raw, adjusted, slots, tokens, top_logprobs, out),
        *(scratch.peaks, scratch.sums, scratch.larger, scratch.best, scratch.arrived),
        *(logits.stride(0), raw.stride(0), vocabulary, parts),
        LEAST=-(2**63),
        TOP=TOP,
        WORDS=WORDS,
        MANY=next_power_of_2(parts),
        MANY_BEST=next_power_of_2(parts * TOP),
        CHUNK=CHUNK,
        num_warps=8,
    )
