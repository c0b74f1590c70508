"""Adjusted logits and log-probabilities on the device: kernels/adjust.py and kernels/logprobs.py with their memory.

by slot   bias and counts of tokens: written when a sequence gets its slot, counts also by every step (columns.py has settings
          that are a number per slot)
by row    bans and masks: written before a step that has any; those of the previous step are cleared

Bias, counts and the kept logits are [slots, vocabulary]: 12 bytes per slot and token of the vocabulary, 400 MB for 256 slots
and 128,256 tokens. In return no step's cost depends on a sequence's length. Bans have room for the maximum of all slots, 8 MB
for 256 slots: growing memory would invalidate all recorded graphs that draw.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.arrays import Int64s
from baton.worker.cuda.columns import kind_of
from baton.worker.cuda.kernels.adjust import BIASED, TALLIED, AdjustColumns, RowAdjustments
from baton.worker.cuda.kernels.logprobs import WORDS, LogprobScratch
from baton.worker.draft_rows import DraftCounts
from baton.worker.sampling_columns import SamplingColumns
from baton.worker.sampling_state import BANS_MAX, SequenceSampling
from baton.worker.step_rules import Bans
from baton.worker.token_masks import Masks

PROMPT_ROWS_MIN = 64
"""Rows of a prompt's logits per pass: the number of slots, or at least this many."""


def sent(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to the device asynchronously, in the order of the current stream."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Adjustments:
    def __init__(self, columns: AdjustColumns, rows: int, sampled: int) -> None:
        """rows: maximum of rows of a step, prompts included. sampled: maximum of rows that get a token."""
        device, vocabulary = columns.bias.device, columns.bias.shape[1]

        def column(count: int, value: int = 0) -> Tensor:
            return torch.full((count,), value, dtype=torch.int32, device=device)

        self.device, self.vocabulary = device, vocabulary
        self.columns = columns
        words = -(-vocabulary // 32)
        self.rows = RowAdjustments(
            ban_ends=column(sampled + 1),
            bans=torch.zeros(sampled * BANS_MAX, 2, dtype=torch.int32, device=device),
            masked=column(sampled, -1),
            masks=torch.zeros(sampled, words, dtype=torch.int32, device=device),
            adjusted=column(sampled),
        )
        kept = max(sampled, PROMPT_ROWS_MIN)
        self.raw = torch.zeros(kept, vocabulary, dtype=torch.float32, device=device)
        "Unchanged logits of adjusted rows. After the tokens are chosen the buffer holds logits of prompts."
        self.logprob_words = torch.zeros(sampled, WORDS, dtype=torch.int32, device=device)
        self.prompt_words = torch.zeros(rows, WORDS, dtype=torch.int32, device=device)
        self.scratch = LogprobScratch(kept, vocabulary, device)
        self.every_row = torch.arange(kept, dtype=torch.int32, device=device)
        self.nothing_adjusted = column(kept)
        self._has_bans = False
        self._masked: list[int] = []
        "Rows with masks in the last step that had rules."

    # Columns by slot

    def write(self, host: SamplingColumns, slots: Int64s) -> None:
        """Writes the settings of the sequences in these slots, on the current stream."""
        states = [(slot, state) for slot in slots.tolist() if (state := host.states[slot]) is not None]
        if not states:
            return
        kinds = [kind_of(state) for _, state in states]
        self._write_bias([(slot, state) for (slot, state), kind in zip(states, kinds, strict=True) if kind & BIASED.value])
        self._write_counts([(slot, state) for (slot, state), kind in zip(states, kinds, strict=True) if kind & TALLIED.value])

    def _write_bias(self, states: list[tuple[int, SequenceSampling]]) -> None:
        if not states:
            return
        bias = self.columns.bias
        bias.index_fill_(0, sent(np.array([slot for slot, _ in states]), self.device), 0.0)
        flat = bias.view(-1)
        places = self._places([(slot, state.bias_ids) for slot, state in states])
        flat.index_copy_(0, places, sent(np.concatenate([state.bias_values for _, state in states]), self.device))
        words = [(slot, state.bad_words.always) for slot, state in states if state.bad_words is not None]
        if words:
            flat.index_fill_(0, self._places(words), float("-inf"))

    def _write_counts(self, states: list[tuple[int, SequenceSampling]]) -> None:
        tallies = [(slot, state.tally) for slot, state in states if state.tally is not None]
        if not tallies:
            return
        counts = self.columns.counts
        counts.index_fill_(0, sent(np.array([slot for slot, _ in tallies]), self.device), 0)
        places = self._places([(slot, tally.ids) for slot, tally in tallies])
        seen = np.concatenate([tally.outputs for _, tally in tallies]).astype(np.int32) * 2 + 1
        counts.view(-1).index_copy_(0, places, sent(seen, self.device))

    def count(self, tokens: Int64s) -> None:
        """Counts these output tokens, on the current stream. [2, tokens]: slots, tokens."""
        slots, ids = tokens
        flat, times = np.unique(slots * self.vocabulary + ids, return_counts=True)
        self._add(sent(np.stack((flat, times)), self.device))

    def _add(self, tokens: Tensor) -> None:
        """[2, tokens]: index into the flat counts, and how often the token is added. No index occurs twice."""
        flat, (at, added) = self.columns.counts.view(-1), tokens
        flat.index_copy_(0, at, (flat.index_select(0, at) | 1) + (2 * added).to(torch.int32))

    def _places(self, ids: list[tuple[int, Int64s]]) -> Tensor:
        return sent(np.concatenate([slot * self.vocabulary + part for slot, part in ids]), self.device)

    # Columns by row

    @torch.inference_mode()
    def write_draft_counts(self, drafts: DraftCounts) -> None:
        """Writes the counts of draft rows of the next step, on the current stream."""
        counts, rows = self.columns.counts, len(drafts.places)
        on_device = sent(np.concatenate((drafts.places, drafts.slots, drafts.tokens.reshape(-1))), self.device)
        to, slots = on_device[: 2 * rows].view(2, rows)
        counts.index_copy_(0, to, counts.index_select(0, slots))
        self._add(on_device[2 * rows :].view(2, -1))

    def write_rules(self, bans: Bans | None, masks: Masks | None) -> None:
        """Writes the rules of the next step, on the current stream."""
        if bans is not None or masks is not None or self._has_bans or self._masked:
            self._write_rules(bans, masks)

    @torch.inference_mode()
    def _write_rules(self, bans: Bans | None, masks: Masks | None) -> None:
        if bans is not None or self._has_bans:
            ends = np.zeros(len(self.rows.ban_ends), np.int32)
            if bans is not None:
                ends[: len(bans.ends)] = bans.ends
                ends[len(bans.ends) :] = bans.ends[-1]
                self.rows.bans[: len(bans.pairs)].copy_(sent(bans.pairs, self.device))
            self.rows.ban_ends.copy_(sent(ends, self.device))
        if masks is not None:
            self.rows.masks[: len(masks.bits)].copy_(sent(masks.bits.view(np.int32), self.device))
        rows = [] if masks is None else masks.rows.tolist()
        if rows != self._masked:
            masked = np.full(len(self.rows.masked), -1, np.int32)
            masked[rows] = np.arange(len(rows))
            self.rows.masked.copy_(sent(masked, self.device))
        self._has_bans, self._masked = bans is not None, rows
