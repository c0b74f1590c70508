"""Log-probabilities of sampled tokens and of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.protocol.step import TokenLogprob
from baton.worker.arrays import Floats
from baton.worker.draws import Ids


def log_softmax(logits: Floats) -> Floats:
    """Log-softmax of [rows, vocabulary]. Row by row, so that a row's result is independent of others."""
    logprobs = np.empty_like(logits)
    for row, out in zip(logits, logprobs, strict=True):
        np.subtract(row, row.max(), out=out)
        out -= np.float32(np.log(np.exp(out).sum(dtype=np.float64)))
    return logprobs


def describe_rows(raw: Sequence[tuple[int, int, Floats]], tokens: Ids) -> dict[int, TokenLogprob]:
    """Log-probabilities of some rows. `raw`: (row, number of top tokens, log-probabilities [1, vocabulary])."""
    return {i: describe(row, tokens[i : i + 1], top)[0] for i, top, row in raw}


def describe(logprobs: Floats, tokens: Ids, top: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens, one per row. logprobs: [rows, vocabulary]."""
    own = logprobs[np.arange(len(tokens)), tokens]
    ranks = ((logprobs > own[:, None]).sum(-1) + 1).tolist()
    rows = zip(tokens.tolist(), own.tolist(), ranks, logprobs, strict=True)
    return [TokenLogprob(token, value, rank, _likeliest(row, top)) for token, value, rank, row in rows]


def _likeliest(row: Floats, count: int) -> tuple[tuple[int, float], ...]:
    """The best `count` tokens, best first; equal tokens by id."""
    count = min(count, row.size)
    if count == 0:
        return ()
    candidates = np.flatnonzero(row >= np.partition(row, -count)[-count])
    pairs = zip(candidates.tolist(), row[candidates].tolist(), strict=True)
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count])
