"""What the model thought of tokens: log-probabilities of sampled tokens and of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.protocol.step import TokenLogprob
from baton.worker.draws import Ids


def describe_rows(raw: Sequence[tuple[int, int, Tensor]], tokens: Ids) -> dict[int, TokenLogprob]:
    """`raw`: (row, how many of the likeliest are wanted, log-probabilities [vocabulary])."""
    return {i: describe(row[None], np.array([tokens[i]]), top)[0] for i, top, row in raw}


def describe(logprobs: Tensor, tokens: Ids, top: int) -> list[TokenLogprob]:
    """logprobs: [rows, vocabulary]; one token a row."""
    own = logprobs.gather(1, torch.from_numpy(tokens.astype(np.int64))[:, None])
    ranks = ((logprobs > own).sum(-1) + 1).tolist()
    values, ids = logprobs.topk(min(top, logprobs.shape[1]))
    best = [_best_first(*pairs) for pairs in zip(ids.tolist(), values.tolist(), strict=True)]
    rows = zip(tokens.tolist(), own.flatten().tolist(), ranks, best, strict=True)
    return [TokenLogprob(token, value, rank, likeliest) for token, value, rank, likeliest in rows]


def _best_first(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    """Equal ones by id: topk leaves their order open."""
    return tuple(sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0])))
