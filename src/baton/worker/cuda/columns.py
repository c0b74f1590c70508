"""Settings by slot on the device: all columns are rows of two matrices, so that changed slots are written by one copy and two
scatters. (A write per column took a millisecond of a first token, before anything was launched.)

    wide     int64   top_p, min_p (bits of float64), seed
    narrow   int32   temperature, repetition, presence, frequency (bits of float32), top_k, sequence_index, kinds, top_logprobs
"""

from __future__ import annotations

import numpy as np
import torch

from baton.worker.arrays import Int64s
from baton.worker.cuda.kernels.adjust import BIASED, TALLIED, AdjustColumns
from baton.worker.cuda.kernels.sample import DrawColumns
from baton.worker.sampling_columns import SamplingColumns
from baton.worker.sampling_state import SequenceSampling

ALIGNED = 4
"""Rows begin at multiples of 16 bytes, as the kernels assume."""
WIDE, NARROW = 3, 8


class SlotColumns:
    def __init__(self, slots: int, vocabulary: int, device: torch.device | str, *, drafts: int = 0) -> None:
        """Defaults: greedy, without adjustments. drafts: rows with counts of their own, behind those of the slots."""
        padded = -(-slots // ALIGNED) * ALIGNED
        self._wide = torch.zeros(WIDE, padded, dtype=torch.int64, device=device)
        self._narrow = torch.zeros(NARROW, padded, dtype=torch.int32, device=device)
        top_p, min_p = self._wide[:2, :slots].view(torch.float64)
        temperature, repetition, presence, frequency = self._narrow[:4, :slots].view(torch.float32)
        top_k, sequence_index, kinds, top_logprobs = self._narrow[4:, :slots]
        top_p.fill_(1.0)
        repetition.fill_(1.0)
        top_logprobs.fill_(-1)
        self.draws = DrawColumns(temperature, top_k, top_p, min_p, self._wide[2, :slots], sequence_index)
        bias = torch.zeros(slots, vocabulary, dtype=torch.float32, device=device)
        counts = torch.zeros(slots + drafts, vocabulary, dtype=torch.int32, device=device)
        self.adjust = AdjustColumns(kinds, top_logprobs, repetition, presence, frequency, bias, counts)

    def write(self, host: SamplingColumns, slots: Int64s) -> None:
        """Writes the settings of the sequences in these slots, without bias and counts (adjustments.py), on the current
        stream."""
        draws, states = host.draws[slots], [host.states[slot] for slot in slots.tolist()]
        rows = np.zeros((1 + WIDE + NARROW, len(slots)), np.int64)
        rows[0] = slots
        rows[1], rows[2] = draws["top_p"].view(np.int64), draws["min_p"].view(np.int64)
        rows[3] = host.seeds[slots].view(np.int64)
        numbers = np.array([_numbers(state) for state in states], np.float32)
        rows[4:8] = np.vstack((draws["temperature"], numbers.T)).view(np.int32)
        rows[8], rows[9] = np.maximum(draws["top_k"], 0), host.indices[slots].view(np.int64)
        rows[10:] = np.array([(kind_of(state), _logprob_count(state)) for state in states]).T
        sent = torch.from_numpy(rows)
        if self._wide.is_cuda:
            sent = sent.pin_memory().to(self._wide.device, non_blocking=True)
        self._wide.index_copy_(1, sent[0], sent[1:4])
        self._narrow.index_copy_(1, sent[0], sent[4:].to(torch.int32))


def kind_of(state: SequenceSampling | None) -> int:
    """The kinds of adjustments of a slot. `state` None: the sequence has already left its slot."""
    if state is None:
        return 0
    biased = state.bias_ids.size or (state.bad_words is not None and state.bad_words.always.size)
    return (BIASED.value if biased else 0) | (TALLIED.value if state.tally is not None else 0)


def _logprob_count(state: SequenceSampling | None) -> int:
    """Number of requested top log-probabilities; -1: none requested."""
    return -1 if state is None or state.params.logprobs is None else state.params.logprobs


def _numbers(state: SequenceSampling | None) -> tuple[float, float, float]:
    if state is None:
        return 1.0, 0.0, 0.0
    params = state.params
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty
