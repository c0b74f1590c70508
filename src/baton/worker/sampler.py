"""Samples tokens from logits, for all due rows of a step.

judge      a row with NaN or infinity fails alone
keep       the model's logits of rows with requested log-probabilities, before they are adjusted
adjust     bad words, min_tokens, bias, penalties: all rows' changes in one indexed operation per kind; a forced token
           (thought.py) excludes all others
choose     the likeliest token, or a draw, of those that the row's grammar allows: defined in draws.py, implemented by the
           forward pass (Forward.choose). A failed grammar allows nothing, so its row fails alone

If every row is plain greedy, the common case, only the likeliest allowed tokens are needed, and no logits are stored; a row
whose likeliest token is excluded otherwise is sampled again (executors/stepwise.py). The order of adjustments and the tokens
that each counts (repetition: prompt and output; presence and frequency: output) are vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.protocol.step import TokenLogprob
from baton.worker.arrays import Floats, Int32s, Int64s
from baton.worker.draws import NOT_FINITE_ID, Draws, Ids
from baton.worker.draws import choose as choose_in_numpy
from baton.worker.failure import NOT_FINITE, NOTHING_LEFT, Failure
from baton.worker.logprobs import describe_rows, log_softmax
from baton.worker.sampling_state import SequenceSampling
from baton.worker.token_masks import Masks, masks_of

Choose = Callable[[Floats, Draws, Masks | None], Int64s]
"""Chooses tokens: Forward.choose, or draws.choose."""


@dataclass(slots=True)
class SampleRow:
    """A due sequence of a step."""

    state: SequenceSampling
    outputs: Int32s
    "Output tokens so far."


@dataclass(slots=True)
class Chosen:
    """Results by row."""

    tokens: Ids
    "Sampled tokens. Undefined for failed rows."
    failed: dict[int, Failure] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    "Log-probabilities, for rows that requested them."


def plain(tokens: Int64s) -> Chosen:
    """Results of plain greedy rows, from Forward.likeliest."""
    return Chosen(tokens, _failed(tokens))


def sample(logits: Floats, rows: Sequence[SampleRow], draws: Draws, choose: Choose = choose_in_numpy) -> Chosen:
    """Samples a token per row. logits: float32 [rows, vocabulary], which may be changed here. `draws`: one per row
    (SamplingColumns.draws_at)."""
    asked = [i for i, row in enumerate(rows) if row.state.params.logprobs is not None]
    touched = [i for i, row in enumerate(rows) if row.state.adjusted]
    failed, raw = {}, []
    if asked or touched:  # choosing checks the rows without adjustments
        failed = {i: NOT_FINITE for i in {*asked, *touched} if not np.isfinite(logits[i]).all()}
        raw = [(i, rows[i].state.params.logprobs or 0, log_softmax(logits[i : i + 1])) for i in asked if i not in failed]
        _adjust(logits, rows, [i for i in touched if i not in failed])
    tokens = choose(logits, draws, _masks(rows, logits.shape[1]))
    failed = _failed(tokens) | failed
    logprobs = {i: row for i, row in describe_rows(raw, tokens).items() if i not in failed}
    return Chosen(tokens, failed, logprobs)


def _failed(tokens: Ids) -> dict[int, Failure]:
    """Failures among the chosen tokens."""
    if tokens.min() >= 0:
        return {}
    return {i: NOT_FINITE if tokens[i] == NOT_FINITE_ID else NOTHING_LEFT for i in np.flatnonzero(tokens < 0).tolist()}


def _masks(rows: Sequence[SampleRow], vocabulary: int) -> Masks | None:
    """Masks of the rows' grammars; waits for pending ones."""
    grammars = {i: row.state.grammar for i, row in enumerate(rows)}
    return masks_of({i: one.mask_of(vocabulary) for i, one in grammars.items() if one is not None}, np.arange(len(rows)))


# Adjusting


def _adjust(logits: Floats, rows: Sequence[SampleRow], touched: list[int]) -> None:
    """Changes the logits of the touched rows in place: excluded tokens, bias, penalties, then a forced token."""
    forbidden = [(i, rows[i].state.forbidden(rows[i].outputs)) for i in touched]
    at = _places(forbidden)
    if at is not None:
        logits[at] = -np.inf
    at = _places([(i, rows[i].state.bias_ids) for i in touched])
    if at is not None:
        logits[at] += np.concatenate([rows[i].state.bias_values for i in touched])
    _penalise(logits, [(i, rows[i].state) for i in touched if rows[i].state.tally is not None])
    for i in touched:
        forced = rows[i].state.forced(rows[i].outputs)
        if forced is not None:
            only = logits[i, forced]
            logits[i] = -np.inf
            logits[i, forced] = only


def _penalise(logits: Floats, states: list[tuple[int, SequenceSampling]]) -> None:
    """Applies repetition, frequency and presence penalties to the rows of these states, in place."""
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
    """Row and column of every id, as an index. None: empty."""
    columns = [part for _, part in ids]
    if not any(part.size for part in columns):
        return None
    rows = np.repeat(np.array([i for i, _ in ids], np.int64), [part.size for part in columns])
    return rows, np.concatenate(columns)
