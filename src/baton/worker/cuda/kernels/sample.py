"""Draws tokens on the device, as worker/draws.py: a function of (seed, index, position) and of the row's logits.

argmax.py runs first: it gives the likeliest tokens, largest logits and failures of every row, and rows without a temperature
are done. For the others `_draw` (many programs per row) sums the weights and

  plain      looks the uniform number up in the running sum by token id: chunk first, then inside the chunk
  limited    (top-k, top-p, min-p) leaves the row to top_k.py, which collects the few candidates that may pass and searches
             among them

A row with more than CANDIDATES candidates (a flat distribution) is left to full_vocab_sample.py: slow, but correct.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.argmax import CHUNK, SMALL, ArgmaxScratch
from baton.worker.cuda.kernels.draw_math import share_of, uniform, units, weigh
from baton.worker.cuda.kernels.full_vocab_sample import pick_from_all
from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2
from baton.worker.cuda.kernels.top_k import BINS, collect, mass_by_size, pick

CANDIDATES = 8192
TEMPERATURE_LEAST = 1e-30


class DrawColumns(NamedTuple):
    """Columns by slot: written when a sequence gets its slot."""

    temperature: torch.Tensor
    "float32 temperature; 0: greedy."
    top_k: torch.Tensor
    "int32 top_k; 0: all."
    top_p: torch.Tensor
    "float64 top_p."
    min_p: torch.Tensor
    "float64 min_p."
    seed: torch.Tensor
    "int64: the bits of the uint64 seed."
    sequence_index: torch.Tensor
    "int32: index among the n sequences of its request."


class SampleScratch:
    def __init__(self, rows: int, vocabulary: int, device: torch.device | str) -> None:
        self.parts = cdiv(vocabulary, CHUNK)
        self.argmax = ArgmaxScratch(rows, vocabulary, device)
        self.sums = torch.empty(rows, self.parts, dtype=torch.int64, device=device)
        self.bins = torch.empty(rows, self.parts, BINS, dtype=torch.float32, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)
        self.weights = torch.empty(rows, CANDIDATES, dtype=torch.float32, device=device)
        self.ids = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=device)


@triton.jit
def _draw(
    logits, slots, positions, tokens, last_tokens, temperatures, top_ks, top_ps, min_ps, seeds, indices,
    peaks, sums, bins, arrived, row_stride, vocabulary, parts,
    TEMPERATURE_LEAST: tl.constexpr, MANY: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
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
        if (top_k == 0) & (min_p == 0.0):
            mass_by_size(weight, bins + (row * parts + part) * BINS, BINS)
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


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: DrawColumns,
    scratch: SampleScratch,
    tokens: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """Draw a token for rows whose slot has a temperature. Must follow argmax, with the same arguments.

    positions: int32 [rows], number of earlier output tokens.
    """
    rows, vocabulary = logits.shape
    kept, parts = scratch.argmax, scratch.parts
    many = next_power_of_2(parts)
    drawn = (slots, positions, tokens, last_tokens, *columns)
    _draw[(rows, parts)](
        *(logits, *drawn, kept.peaks, scratch.sums, scratch.bins, scratch.arrived, logits.stride(0), vocabulary, parts),
        TEMPERATURE_LEAST=TEMPERATURE_LEAST,
        MANY=many,
        BINS=BINS,
        CHUNK=CHUNK,
        num_warps=8,
    )
    candidates = (scratch.counts, scratch.weights, scratch.ids)
    collect[(rows, parts)](
        *(logits, slots, tokens, *columns[:4], kept.peaks, kept.small_best, scratch.bins, *candidates),
        *(logits.stride(0), vocabulary, parts),
        TEMPERATURE_LEAST=TEMPERATURE_LEAST,
        CANDIDATES=CANDIDATES,
        MANY=many,
        MANY_SMALL=min(512, next_power_of_2(parts * (CHUNK // SMALL))),
        BINS=BINS,
        CHUNK=CHUNK,
        SMALL=SMALL,
        num_warps=8,
    )
    pick[(rows,)](*(*drawn, scratch.sums, *candidates, parts, vocabulary), CANDIDATES=CANDIDATES, MANY=many, num_warps=8)
    pick_from_all(logits, slots, positions, columns, kept.peaks, scratch.counts, tokens, last_tokens, CANDIDATES)
