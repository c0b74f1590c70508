"""The likeliest token of each row of logits, and facts for a draw.

Many programs per row, CHUNK logits each; the last arriver compares their winners. The lowest id wins a tie, as in numpy. A row
with NaN or infinity gets NOT_FINITE_ID. In a row that adjust.py has changed, minus infinity marks an excluded token; a row with
nothing else gets NOTHING_LEFT_ID.

Beside the token, each program keeps the largest logit of every SMALL logits: the k-th largest of those is no larger than the
k-th largest of all, so with top-k all tokens below it are out (sample.py).
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2

CHUNK = 4096
SMALL = 256
NOT_FINITE_ID = -1
NOTHING_LEFT_ID = -2


class ArgmaxScratch:
    def __init__(self, rows: int, vocabulary: int, device: torch.device | str) -> None:
        parts = cdiv(vocabulary, CHUNK)
        self.best = torch.empty(rows, parts, dtype=torch.float32, device=device)
        self.best_at = torch.empty(rows, parts, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)
        self.small_best = torch.empty(rows, parts * (CHUNK // SMALL), dtype=torch.float32, device=device)
        "Maximum of every SMALL logits."
        self.peaks = torch.empty(rows, dtype=torch.float32, device=device)
        "Maximum of each row."


@triton.jit
def _argmax(
    logits, slots, tokens, last_tokens, adjusted, peaks, best, best_at, small_best, arrived,
    row_stride, vocabulary, parts, EXCLUDES: tl.constexpr, MANY: tl.constexpr, CHUNK: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:  # padding
        return
    at = part * CHUNK + tl.arange(0, CHUNK)
    inside = at < vocabulary
    x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    wrong = (x != x) | (tl.abs(x) == float("inf"))
    if EXCLUDES:
        wrong = wrong & ((x != float("-inf")) | (tl.load(adjusted + row) == 0))
    broken = tl.max((inside & wrong).to(tl.int32), 0)
    value, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    winner = tl.where(broken > 0, -1, part * CHUNK + index)
    tl.store(best + row * parts + part, value)
    tl.store(best_at + row * parts + part, winner)
    small = tl.max(tl.reshape(x, [CHUNK // SMALL, SMALL]), 1)
    tl.store(small_best + (row * parts + part) * (CHUNK // SMALL) + tl.arange(0, CHUNK // SMALL), small)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") < parts - 1:
        return
    tl.store(arrived + row, 0)
    each = tl.arange(0, MANY)
    values = tl.load(best + row * parts + each, mask=each < parts, other=float("-inf"), cache_modifier=".cg")
    places = tl.load(best_at + row * parts + each, mask=each < parts, other=0, cache_modifier=".cg")
    value, index = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.sum(tl.where(each == index, places, 0), 0)
    if EXCLUDES:
        token = tl.where(value == float("-inf"), -2, token)
    token = tl.where(tl.min(places, 0) < 0, -1, token)
    tl.store(peaks + row, value)
    tl.store(tokens + row, token)
    tl.store(last_tokens + slot, token)


def argmax(
    logits: torch.Tensor,
    slots: torch.Tensor,
    scratch: ArgmaxScratch,
    tokens: torch.Tensor,
    last_tokens: torch.Tensor,
    adjusted: torch.Tensor | None = None,
) -> None:
    """The likeliest tokens. logits: [rows, vocabulary] -> tokens int32 [rows], and into last_tokens[slots[row]]. slots: int32
    [rows], -1: padding. adjusted: int32 [rows], of adjust.py; None: it has not run."""
    rows, vocabulary = logits.shape
    parts = cdiv(vocabulary, CHUNK)
    _argmax[(rows, parts)](
        *(
            logits,
            slots,
            tokens,
            last_tokens,
            slots if adjusted is None else adjusted,
            scratch.peaks,
            scratch.best,
            scratch.best_at,
            scratch.small_best,
            scratch.arrived,
        ),
        *(logits.stride(0), vocabulary, parts),
        EXCLUDES=adjusted is not None,
        MANY=next_power_of_2(parts),
        CHUNK=CHUNK,
        SMALL=SMALL,
        num_warps=4,
    )
