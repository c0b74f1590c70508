"""One vector for a whole prompt: the mean of its hidden states after the last norm, or the last one, scaled to length 1.

A prompt comes in chunks, and which chunks depends on what else runs, and on preemptions. A sum of floats would depend on them
too. So the states are summed as integers, in steps of 2^-24: the sum is exact, and the vector has the same bits however the
prompt was cut.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from baton.protocol.request import Pooling
from baton.worker.arrays import Floats

STEPS_PER_ONE: Final = float(1 << 24)
LARGEST: Final = float(1 << 14)
"""Beyond it a state is cut off. Ordinary ones are below 100; so 2^24 tokens of the largest fit into 63 bits."""


class PromptPool:
    """Of one sequence, from its first token on."""

    __slots__ = ("_kind", "_sum", "_tokens")

    def __init__(self, kind: Pooling) -> None:
        self._kind = kind
        self._sum: NDArray[np.int64] | None = None
        self._tokens = 0

    def add(self, begin: int, states: Floats, *, last: bool) -> bytes:
        """`states`: [tokens, width] from position `begin` on. The vector, where this is the end of the prompt."""
        if self._kind == "last":
            return _of_length_one(states[-1].astype(np.float64)) if last else b""
        if begin == 0:
            self._sum, self._tokens = np.zeros(states.shape[1], np.int64), 0
        if self._sum is None or begin != self._tokens:
            raise ValueError(f"a chunk of a prompt begins at {begin} and {self._tokens} tokens were pooled")
        steps = np.rint(np.clip(states.astype(np.float64), -LARGEST, LARGEST) * STEPS_PER_ONE)
        self._sum += steps.astype(np.int64).sum(0)
        self._tokens += len(states)
        return _of_length_one(self._sum / (STEPS_PER_ONE * self._tokens)) if last else b""


def normed(hidden: Floats, weight: Floats, eps: float) -> Floats:
    """The model's last norm, row by row: a row does not know of the others."""
    wide = hidden.astype(np.float64)
    scale = np.array([1.0 / np.sqrt(np.dot(row, row) / len(row) + eps) for row in wide])
    states: Floats = (wide * scale[:, None] * weight).astype(np.float32)
    return states


def _of_length_one(vector: NDArray[np.float64]) -> bytes:
    length = float(np.sqrt(np.dot(vector, vector)))
    return (vector / length if length > 0.0 else vector).astype("<f4").tobytes()
