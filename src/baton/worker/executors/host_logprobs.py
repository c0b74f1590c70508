"""Log-probabilities of prompts, from logits on the host."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from baton.protocol.step import TokenLogprob
from baton.worker.arrays import Floats, Int64s
from baton.worker.executors.base import PromptLogprobs
from baton.worker.flat_batch import FlatBatch
from baton.worker.logprobs import describe, log_softmax
from baton.worker.sampling_batch import SamplingBatch

PROMPT_ROWS_AT_ONCE = 64
"""Rows of a prompt's logits per pass: all at once would be gigabytes."""

LogitsOf = Callable[[int, int], Floats]
"""Computes the logits of rows [first, second) of the flat batch."""


def describe_prompts(
    batch: FlatBatch, sampling: SamplingBatch, failed: Collection[int], logits_of: LogitsOf
) -> dict[int, PromptLogprobs]:
    """Log-probabilities of prompts. The row at position p has that of the token at p + 1; the first token has none."""
    prompts: dict[int, PromptLogprobs] = {}
    sequences, spans = sampling.sequences, batch.spans
    for place, (slot, state) in enumerate(zip(sampling.slots.tolist(), sampling.states, strict=True)):
        top = state.params.prompt_logprobs
        if top is None or place in failed:
            continue
        begin, first = int(spans.contexts[place]), int(spans.starts[place])
        count = int(spans.starts[place + 1]) - first
        end = min(begin + count, int(sequences.prompt_tokens[slot]) - 1)
        if begin < end:
            targets = sequences.tokens[slot, begin + 1 : end + 1].astype(np.int64)
            prompts[place] = (begin + 1, _describe(first, targets, top, logits_of))
    return prompts


def _describe(first: int, targets: Int64s, top: int, logits_of: LogitsOf) -> tuple[TokenLogprob, ...]:
    described: list[TokenLogprob] = []
    for at in range(0, len(targets), PROMPT_ROWS_AT_ONCE):
        part = targets[at : at + PROMPT_ROWS_AT_ONCE]
        described += describe(log_softmax(logits_of(first + at, first + at + len(part))), part, top)
    return tuple(described)
