"""Embeddings: which rows of a step are summed up on the device, and vectors of what comes back (worker/pooling.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from baton.worker.arrays import Int32s, Int64s
from baton.worker.pooling import PromptPart


def pooled_rows(parts: Sequence[PromptPart]) -> Int32s:
    """StepBatch.pooled. Of who wants the first or the last state alone, that one of the chunk: only the one of the first or of
    the last chunk is used."""
    return np.array([_rows(part) for part in parts], np.int32)


def _rows(part: PromptPart) -> tuple[int, int]:
    """The first, and how many."""
    match part.pool.kind:
        case "last":
            return part.row + part.tokens - 1, 1
        case "cls":
            return part.row, 1
        case "mean":
            return part.row, part.tokens


def read_vectors(sums: Int64s, parts: Sequence[PromptPart], failed: Collection[int]) -> dict[int, bytes]:
    """By place, of prompts that have ended. Later chunks of one that failed may be under way: they find a gap otherwise."""
    found = {}
    for total, part in zip(sums, parts, strict=True):
        part.pool.failed |= part.place in failed
        if not part.pool.failed and (vector := part.pool.add_sum(part.begin, part.tokens, total, last=part.last)):
            found[part.place] = vector
    return found
