"""Embeddings: the rows of a step that are summed on the device, and the vectors from these sums (worker/pooling.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from baton.worker.arrays import Int32s, Int64s
from baton.worker.pooling import PromptPart


def pooled_rows(parts: Sequence[PromptPart]) -> Int32s:
    """The rows to sum (StepBatch.pooled). "last" and "cls" need one row of the chunk: only that of the first or the last chunk
    is used later."""
    return np.array([_rows(part) for part in parts], np.int32)


def _rows(part: PromptPart) -> tuple[int, int]:
    """First row and number of rows to sum."""
    match part.pool.kind:
        case "last":
            return part.row + part.tokens - 1, 1
        case "cls":
            return part.row, 1
        case "mean":
            return part.row, part.tokens


def read_vectors(sums: Int64s, parts: Sequence[PromptPart], failed: Collection[int]) -> dict[int, bytes]:
    """Vectors by batch index, for prompts that have ended. Later chunks of a failed prompt may be in flight: without the flag
    they would find a gap."""
    found = {}
    for total, part in zip(sums, parts, strict=True):
        part.pool.failed |= part.place in failed
        if not part.pool.failed and (vector := part.pool.add_sum(part.begin, part.tokens, total, last=part.last)):
            found[part.place] = vector
    return found
