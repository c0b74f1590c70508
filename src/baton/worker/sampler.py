"""Logits in, tokens out, for all rows that are due in a step.

judge      a row with a number that is none fails, alone
keep       raw logits of rows that want log-probabilities: they report what the model said, before we changed it
adjust     bad words, min_tokens, bias, penalties: all rows' changes in one indexed operation a kind
choose     the likeliest, or a draw (draws.py)

If every row is plain greedy, the common case, only the first line and an argmax happen. The order of adjustments and what
each counts (repetition: prompt and output; presence and frequency: output) are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.protocol.step import TokenLogprob
from baton.worker.attention.base import Int32s
from baton.worker.draws import Ids, draw_from_all, draw_from_best, uniforms
from baton.worker.logprobs import describe_rows
from baton.worker.sampling_state import SequenceSampling

NOT_FINITE = "NaN or infinity in the logits"
NOTHING_LEFT = "no token is allowed here: bias, bad words and stop ids exclude the whole vocabulary"
WEIGHTS_AT_ONCE = 1 << 23
"""Numbers in the matrix of weights of one round of draws: 32 MiB, however many rows there are."""


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


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """logits: float32 [rows, vocabulary], which this may change."""
    best, tokens = logits.max(-1)
    finite = best.isfinite() & logits.amin(-1).isfinite()
    result = Sampled(tokens.numpy())
    if not finite.all():
        result.failed = dict.fromkeys((~finite).nonzero().flatten().tolist(), NOT_FINITE)
    if all(row.state.plain for row in rows):
        return result
    raw = _keep_raw(logits, rows, result.failed)
    touched = [i for i, row in enumerate(rows) if row.state.adjusted and i not in result.failed]
    if touched:
        _adjust(logits, rows, touched)
        best[touched], tokens[touched] = logits[touched].max(-1)
        for i in touched:
            if not best[i].isfinite():
                result.failed[i] = NOTHING_LEFT
    drawn = [i for i, row in enumerate(rows) if row.state.random and i not in result.failed]
    if drawn:
        result.tokens[drawn] = _draw(logits, best, rows, drawn)
    result.logprobs = {i: row for i, row in describe_rows(raw, result.tokens).items() if i not in result.failed}
    return result


def _keep_raw(logits: Tensor, rows: Sequence[SampleRow], failed: dict[int, str]) -> list[tuple[int, int, Tensor]]:
    asked = [(i, row.state.params.logprobs) for i, row in enumerate(rows)]
    return [(i, top, logits[i].log_softmax(-1)) for i, top in asked if top is not None and i not in failed]


# Adjusting


def _adjust(logits: Tensor, rows: Sequence[SampleRow], touched: list[int]) -> None:
    forbidden = [(i, rows[i].state.forbidden(rows[i].outputs)) for i in touched]
    at = _places(forbidden)
    if at is not None:
        logits[at] = float("-inf")
    at = _places([(i, rows[i].state.bias_ids) for i in touched])
    if at is not None:
        logits[at] += torch.from_numpy(np.concatenate([rows[i].state.bias_values for i in touched]))
    _penalise(logits, [(i, rows[i].state) for i in touched if rows[i].state.tally is not None])


def _penalise(logits: Tensor, states: list[tuple[int, SequenceSampling]]) -> None:
    tallies = [(i, state.params, state.tally) for i, state in states if state.tally is not None]
    at = _places([(i, tally.ids) for i, _, tally in tallies])
    if at is None:
        return
    sizes = [tally.size for _, _, tally in tallies]

    def spread(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes))

    counts = torch.from_numpy(np.concatenate([tally.outputs for _, _, tally in tallies]))
    repetition = spread([params.repetition_penalty for _, params, _ in tallies])
    found = logits[at]
    found = torch.where(found > 0, found / repetition, found * repetition)
    found -= counts * spread([params.frequency_penalty for _, params, _ in tallies])
    found -= (counts > 0) * spread([params.presence_penalty for _, params, _ in tallies])
    logits[at] = found


def _places(ids: list[tuple[int, Ids]]) -> tuple[Tensor, Tensor] | None:
    """Row and column of every id, as an index. None: there are none."""
    columns = [part for _, part in ids]
    if not any(part.size for part in columns):
        return None
    rows = np.repeat(np.array([i for i, _ in ids], np.int64), [part.size for part in columns])
    return torch.from_numpy(rows), torch.from_numpy(np.concatenate(columns))


# Drawing


def _draw(logits: Tensor, best: Tensor, rows: Sequence[SampleRow], drawn: list[int]) -> list[int]:
    states = [rows[i].state for i in drawn]
    chance = uniforms(
        np.array([state.seed for state in states], np.uint64),
        np.array([state.index for state in states], np.uint64),
        np.array([rows[i].outputs.size for i in drawn], np.uint64),
    ).tolist()
    tokens: list[int] = []
    at_once = max(1, WEIGHTS_AT_ONCE // logits.shape[1])
    for begin in range(0, len(drawn), at_once):
        part = slice(begin, begin + at_once)
        weights = _weights(logits, best, drawn[part], states[part])
        tokens += [_draw_one(*row) for row in zip(weights, states[part], chance[part], strict=True)]
    return tokens


def _weights(logits: Tensor, best: Tensor, drawn: list[int], states: list[SequenceSampling]) -> NDArray[np.float32]:
    """e^(logit / temperature), scaled so that the likeliest has 1. Number by number: a row does not see its neighbours."""
    temperatures = torch.tensor([state.params.temperature for state in states])[:, None]
    return logits[drawn].sub_(best[drawn][:, None]).div_(temperatures).exp_().numpy()


def _draw_one(weights: NDArray[np.float32], state: SequenceSampling, chance: float) -> int:
    params = state.params
    if not state.filtered:
        return draw_from_all(weights, chance)
    return draw_from_best(weights, chance, params.top_k, params.top_p, params.min_p)
