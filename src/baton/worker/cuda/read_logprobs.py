"""Log-probabilities: the rows of prompts that request them, and the conversion of kernels/logprobs.py's output to the
protocol."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from baton.protocol.step import TOKEN_ID_MAX, TokenLogprob
from baton.worker.arrays import Floats, Int32s, Int64s
from baton.worker.cuda.step_inputs import PromptRows
from baton.worker.executors.base import PromptLogprobs
from baton.worker.flat_batch import FlatBatch
from baton.worker.sampling_batch import SamplingBatch


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A part of a prompt with requested log-probabilities."""

    place: int
    "Batch index of the sequence."
    first: int
    "Position of the first token."
    tokens: Int64s
    top: int


def prompt_requests(batch: FlatBatch, sampling: SamplingBatch) -> tuple[tuple[AskedPrompt, ...], PromptRows | None]:
    """Parts of prompts with requested log-probabilities, and their rows. The row at position p has the log-probability of the
    token at p + 1; the first token has none."""
    asked, rows = [], []
    sequences, spans = sampling.sequences, batch.spans
    for place, (slot, state) in enumerate(zip(sampling.slots.tolist(), sampling.states, strict=True)):
        top = state.params.prompt_logprobs
        if top is None:
            continue
        begin, row = int(spans.contexts[place]), int(spans.starts[place])
        count = int(spans.starts[place + 1]) - row
        end = min(begin + count, int(sequences.prompt_tokens[slot]) - 1)
        if begin < end:
            asked.append(AskedPrompt(place, begin + 1, sequences.tokens[slot, begin + 1 : end + 1].astype(np.int64), top))
            rows.append(np.arange(row, row + end - begin))
    if not asked:
        return (), None
    top_logprobs = np.repeat([one.top for one in asked], [len(one.tokens) for one in asked])
    columns = (np.concatenate(rows), np.concatenate([one.tokens for one in asked]), top_logprobs)
    return tuple(asked), PromptRows(*(column.astype(np.int32) for column in columns))


def read_sampled(
    words: Int32s, tokens: Int64s, places: Int64s, top_logprobs: Sequence[int | None], failed: Collection[int]
) -> dict[int, TokenLogprob]:
    """Log-probabilities by batch index, for sequences that requested them. words: int32 [due, logprobs.WORDS]."""
    numbers: Floats = words.view(np.float32)
    found = {}
    for row, place in enumerate(places.tolist()):
        top = top_logprobs[place]
        if top is not None and place not in failed:
            found[place] = _read(words[row], numbers[row], int(tokens[row]), top)
    return found


def read_prompts(words: Int32s, asked: Sequence[AskedPrompt], failed: Collection[int]) -> dict[int, PromptLogprobs]:
    numbers: Floats = words.view(np.float32)
    found, at = {}, 0
    for one in asked:
        rows = zip(words[at:], numbers[at:], one.tokens.tolist(), strict=False)
        at += len(one.tokens)
        if one.place not in failed:
            found[one.place] = one.first, tuple(_read(row, values, token, one.top) for row, values, token in rows)
    return found


def _read(words: Int32s, numbers: Floats, token: int, top: int) -> TokenLogprob:
    ids, values = words[2 : 2 + 2 * top : 2].tolist(), numbers[3 : 3 + 2 * top : 2].tolist()
    # a vocabulary may be smaller than that
    likeliest = tuple(pair for pair in zip(ids, values, strict=True) if pair[0] < TOKEN_ID_MAX)
    return TokenLogprob(token, float(numbers[0]), int(words[1]), likeliest)
