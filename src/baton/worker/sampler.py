"""Logits in, tokens out, for all rows that are due in a step.

judge      a row with a number that is none fails, alone
keep       raw logits of rows that want log-probabilities: they report what the model said, before we changed it
adjust     bad words, min_tokens, bias, penalties: all rows' changes in one indexed operation a kind
choose     the likeliest, or a draw (draws.py)

Where every row is plain greedy, the common case, the likeliest tokens are all that is needed, and no logits are stored. The
order of adjustments and what each counts (repetition: prompt and output; presence and frequency: output) are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from baton.protocol.step import TokenLogprob
from baton.worker.arrays import Floats, Int32s, Int64s
from baton.worker.draws import Ids, draw_from_all, draw_from_best, uniforms
from baton.worker.forward.base import NOT_FINITE_ID
from baton.worker.logprobs import describe_rows, log_softmax
from baton.worker.sampling_state import SequenceSampling

NOT_FINITE = "NaN or infinity in the logits"
NOTHING_LEFT = "no token is allowed here: bias, bad words and stop ids exclude the whole vocabulary"


@dataclass(slots=True)
class SampleRow:
    """One sequence that is due."""

    state: SequenceSampling
    outputs: Int32s
    "Its tokens after the prompt, so far."


@dataclass(slots=True)
class Sampled:
    tokens: Ids
    "By row; of a row that failed, nothing."
    failed: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    "For rows that asked."


def likeliest(logits: Floats) -> Int64s:
    """Of each row of [rows, vocabulary]; NOT_FINITE_ID where not all of it is finite."""
    tokens = np.empty(len(logits), np.int64)
    for i, row in enumerate(logits):  # so the second look finds it in the cache
        best = row.argmax()
        # The first not-a-number of a row counts as its largest, so the largest and the least tell about the whole row.
        tokens[i] = best if isfinite(row[best]) and isfinite(np.minimum.reduce(row)) else NOT_FINITE_ID
    return tokens


def plain(tokens: Int64s) -> Sampled:
    """What plain greedy rows get: the likeliest, as Forward.likeliest gave them."""
    if tokens.min() != NOT_FINITE_ID:
        return Sampled(tokens)
    return Sampled(tokens, dict.fromkeys(np.flatnonzero(tokens == NOT_FINITE_ID).tolist(), NOT_FINITE))


def sample(logits: Floats, rows: Sequence[SampleRow]) -> Sampled:
    """logits: float32 [rows, vocabulary], which this may change."""
    result = plain(likeliest(logits))
    tokens = result.tokens
    raw = _keep_raw(logits, rows, result.failed)
    touched = [i for i, row in enumerate(rows) if row.state.adjusted and i not in result.failed]
    if touched:
        _adjust(logits, rows, touched)
        for i in touched:
            tokens[i] = logits[i].argmax()
            if not np.isfinite(logits[i, tokens[i]]):
                result.failed[i] = NOTHING_LEFT
    drawn = [i for i, row in enumerate(rows) if row.state.random and i not in result.failed]
    if drawn:
        tokens[drawn] = _draw(logits, tokens, rows, drawn)
    result.logprobs = {i: row for i, row in describe_rows(raw, result.tokens).items() if i not in result.failed}
    return result


def _keep_raw(logits: Floats, rows: Sequence[SampleRow], failed: dict[int, str]) -> list[tuple[int, int, Floats]]:
    asked = [(i, row.state.params.logprobs) for i, row in enumerate(rows)]
    return [(i, top, log_softmax(logits[i : i + 1])) for i, top in asked if top is not None and i not in failed]


# Adjusting


def _adjust(logits: Floats, rows: Sequence[SampleRow], touched: list[int]) -> None:
    forbidden = [(i, rows[i].state.forbidden(rows[i].outputs)) for i in touched]
    at = _places(forbidden)
    if at is not None:
        logits[at] = -np.inf
    at = _places([(i, rows[i].state.bias_ids) for i in touched])
    if at is not None:
        logits[at] += np.concatenate([rows[i].state.bias_values for i in touched])
    _penalise(logits, [(i, rows[i].state) for i in touched if rows[i].state.tally is not None])


def _penalise(logits: Floats, states: list[tuple[int, SequenceSampling]]) -> None:
    tallies = [(i, state.params, state.tally) for i, state in states if state.tally is not None]
    at = _places([(i, tally.ids) for i, _, tally in tallies])
    if at is None:
        return
    sizes = [tally.size for _, _, tally in tallies]

    def spread(values: list[float]) -> Floats:
        return np.repeat(np.array(values, np.float32), sizes)

    counts = np.concatenate([tally.outputs for _, _, tally in tallies])
    repetition = spread([params.repetition_penalty for _, params, _ in tallies])
    found = logits[at]
    found = np.where(found > 0, found / repetition, found * repetition)
    found -= counts * spread([params.frequency_penalty for _, params, _ in tallies])
    found -= (counts > 0) * spread([params.presence_penalty for _, params, _ in tallies])
    logits[at] = found


def _places(ids: list[tuple[int, Ids]]) -> tuple[Int64s, Int64s] | None:
    """Row and column of every id, as an index. None: there are none."""
    columns = [part for _, part in ids]
    if not any(part.size for part in columns):
        return None
    rows = np.repeat(np.array([i for i, _ in ids], np.int64), [part.size for part in columns])
    return rows, np.concatenate(columns)


# Drawing


def _draw(logits: Floats, best: Ids, rows: Sequence[SampleRow], drawn: list[int]) -> list[int]:
    """`best`: the likeliest token of each row."""
    states = [rows[i].state for i in drawn]
    chance = uniforms(
        np.array([state.seed for state in states], np.uint64),
        np.array([state.index for state in states], np.uint64),
        np.array([rows[i].outputs.size for i in drawn], np.uint64),
    ).tolist()
    weights = np.empty(logits.shape[1], np.float32)
    tokens: list[int] = []
    for i, state, uniform in zip(drawn, states, chance, strict=True):
        # e^(logit / temperature), scaled so that the likeliest has 1. Row by row: what a row gives depends on no other, and
        # one row of a large vocabulary stays in the cache.
        np.subtract(logits[i], logits[i, best[i]], out=weights)
        np.divide(weights, np.float32(state.params.temperature), out=weights)
        np.exp(weights, out=weights)
        tokens.append(_draw_one(weights, state, uniform))
    return tokens


def _draw_one(weights: Floats, state: SequenceSampling, chance: float) -> int:
    params = state.params
    if not state.filtered:
        return draw_from_all(weights, chance)
    return draw_from_best(weights, chance, params.top_k, params.top_p, params.min_p)
