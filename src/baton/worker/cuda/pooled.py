"""Embeddings: which rows of a step are summed up on the device, and vectors of what comes back (worker/pooling.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from baton.worker.arrays import Int32s, Int64s
from baton.worker.pooling import PromptPart


def pooled_rows(parts: Sequence[PromptPart]) -> Int32s:
    """StepBatch.pooled. Of who wants the last state alone, that one; of a chunk that is not the last, whichever."""
    return np.array([_last_row(part) if part.pool.kind == "last" else (part.row, part.tokens) for part in parts], np.int32)


def _last_row(part: PromptPart) -> tuple[int, int]:
    return part.row + part.tokens - 1, 1


def read_vectors(sums: Int64s, parts: Sequence[PromptPart], failed: Collection[int]) -> dict[int, bytes]:
    """By place, of prompts that have ended. Later chunks of one that failed may be under way: they find a gap otherwise."""
    found = {}
    for total, part in zip(sums, parts, strict=True):
        part.pool.failed |= part.place in failed
        if not part.pool.failed and (vector := part.pool.add_sum(part.begin, part.tokens, total, last=part.last)):
            found[part.place] = vector
    return found
