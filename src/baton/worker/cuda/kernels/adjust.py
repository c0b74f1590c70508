"""Changes logits before a token is chosen: bias, penalties, excluded tokens. worker/sampler.py is the definition.

By slot, written when a sequence gets it (../adjustments.py):

  bias     added to each logit; minus infinity for bad words of one token
  counts   0 for an unseen token, else 2 * (its count in the output) + 1; `tally` adds the token of a step. A draft row has a
           copy behind those of the slots, with the drafts before it: `tallies` has the place of each row

By row, written before a step:

  bans     (needed, token): the token is excluded if the last token is `needed`, or always if that is sampling_state.ANY. The
           host does not have the last token yet, so for a bad word of several tokens it sends the last two
  masks    a bit per token that the grammar allows

An unadjusted row costs only a read of its flags. NaN is kept, so the row fails later (argmax.py). Before a row is changed, its
logits are saved if log-probabilities are requested: those are the model's own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import cdiv

CHUNK = 4096
BANS_AT_ONCE = 256
BIASED = tl.constexpr(1)
TALLIED = tl.constexpr(2)


class AdjustColumns(NamedTuple):
    """Columns by slot."""

    kinds: torch.Tensor
    "int32: kinds of adjustments, BIASED and TALLIED."
    top_logprobs: torch.Tensor
    "int32: number of top log-probabilities beside the sampled token; -1: none."
    repetition: torch.Tensor
    "float32, as are the next two columns."
    presence: torch.Tensor
    frequency: torch.Tensor
    bias: torch.Tensor
    "float32 [slots, vocabulary], added to the logits."
    counts: torch.Tensor
    "int32 [slots and draft rows, vocabulary], counts of tokens."


class RowAdjustments(NamedTuple):
    """Columns by row of the logits."""

    ban_ends: torch.Tensor
    "int32 [rows + 1]: the bans of a row are from its own number to the next."
    bans: torch.Tensor
    "int32 [bans, 2]: the last token that activates the ban, and the forbidden token."
    masked: torch.Tensor
    "int32 [rows]: index of the row's mask; -1: none."
    masks: torch.Tensor
    "int32 [masks, words]: token t is bit t % 32 of word t // 32."
    adjusted: torch.Tensor
    "int32 [rows]: whether the row was adjusted. Written by this kernel."


@triton.jit
def _adjust(
    logits, raw, slots, tallies, last_tokens, kinds, top_logprobs, repetitions, presences, frequencies, bias, counts,
    ban_ends, bans, masked, masks, adjusted, row_stride, raw_stride, vocabulary, words,
    BIASED: tl.constexpr, TALLIED: tl.constexpr, CHUNK: tl.constexpr, BANS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:  # padding rows have no slot
        return
    kind = tl.load(kinds + slot)
    first, end = tl.load(ban_ends + row), tl.load(ban_ends + row + 1)
    mask_at = tl.load(masked + row)
    touched = (kind != 0) | (end > first) | (mask_at >= 0)
    if part == 0:
        tl.store(adjusted + row, touched.to(tl.int32))
    if touched == 0:
        return
    here = logits + row.to(tl.int64) * row_stride
    at = part * CHUNK + tl.arange(0, CHUNK)
    inside = at < vocabulary
    x = tl.load(here + at, mask=inside, other=0.0)
    if tl.load(top_logprobs + slot) >= 0:
        tl.store(raw + row.to(tl.int64) * raw_stride + at, x, mask=inside)
    finite = (x == x) & (tl.abs(x) != float("inf"))
    of_slot = slot.to(tl.int64) * vocabulary
    if (kind & BIASED) != 0:
        x += tl.load(bias + of_slot + at, mask=inside, other=0.0)
    if (kind & TALLIED) != 0:
        of_row = tl.load(tallies + row).to(tl.int64) * vocabulary
        seen = tl.load(counts + of_row + at, mask=inside, other=0)
        count = (seen >> 1).to(tl.float32)
        repetition = tl.load(repetitions + slot)
        penalised = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where(seen != 0, penalised, x)
        x -= count * tl.load(frequencies + slot)
        x -= tl.where(count > 0, tl.load(presences + slot), 0.0)
    if mask_at >= 0:
        word = tl.load(masks + mask_at.to(tl.int64) * words + (at >> 5), mask=inside, other=0)
        x = tl.where(((word >> (at & 31)) & 1) != 0, x, float("-inf"))
    tl.store(here + at, tl.where(finite, x, float("nan")), mask=inside)
    if end > first:
        tl.debug_barrier()
        last = tl.load(last_tokens + slot)
        for start in range(first, end, BANS):
            ban = start + tl.arange(0, BANS)
            there = ban < end
            needed = tl.load(bans + ban * 2, mask=there, other=0)
            token = tl.load(bans + ban * 2 + 1, mask=there, other=-1)
            hit = there & ((needed < 0) | (needed == last)) & (token >= part * CHUNK) & (token < (part + 1) * CHUNK)
            was = tl.load(here + token, mask=hit, other=0.0)
            tl.store(here + token, tl.full([BANS], float("-inf"), tl.float32), mask=hit & (was == was))


def adjust(
    logits: torch.Tensor,
    raw: torch.Tensor,
    slots: torch.Tensor,
    tallies: torch.Tensor,
    last_tokens: torch.Tensor,
    columns: AdjustColumns,
    rows: RowAdjustments,
) -> None:
    """Adjust logits: float32 [rows, vocabulary], in place. raw: [rows, vocabulary], written for adjusted rows with
    log-probabilities. tallies: int32 [rows], place of the row's counts."""
    count, vocabulary = logits.shape
    _adjust[(count, cdiv(vocabulary, CHUNK))](
        *(logits, raw, slots, tallies, last_tokens, *columns, *rows),
        *(logits.stride(0), raw.stride(0), vocabulary, rows.masks.shape[1]),
        BIASED=BIASED,
        TALLIED=TALLIED,
        CHUNK=CHUNK,
        BANS=BANS_AT_ONCE,
        num_warps=8,
        enable_fp_fusion=False,  # numpy rounds the product before it subtracts, so this kernel does too
    )


@triton.jit
def _tally(slots, tallies, tokens, kinds, counts, vocabulary, TALLIED: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    token = tl.load(tokens + row)
    if (token < 0) | ((tl.load(kinds + slot) & TALLIED) == 0):
        return
    place = counts + tl.load(tallies + row).to(tl.int64) * vocabulary + token
    tl.store(place, (tl.load(place) + 2) | 1)


def tally(slots: torch.Tensor, tallies: torch.Tensor, tokens: torch.Tensor, columns: AdjustColumns) -> None:
    """Adds this step's tokens to the counts of their rows."""
    kinds, counts = columns.kinds, columns.counts
    _tally[(len(tokens),)](slots, tallies, tokens, kinds, counts, counts.shape[1], TALLIED=TALLIED, num_warps=1)
