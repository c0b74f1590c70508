"""One vector for a whole prompt: the mean of its hidden states after the last norm, the last or the first one, of length 1.

A prompt comes in chunks, which depend on the other requests and on preemptions. A sum of floats would depend on them too. So
the states are summed as integers, in steps of 2^-24: the sum is exact, and the vector has the same bits for any chunks, if its
hidden states have. A GPU sums them itself (cuda/kernels/pool_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.protocol.request import Pooling
from baton.worker.arrays import Floats, Int64s
from baton.worker.flat_batch import FlatBatch
from baton.worker.input_batch import InputBatch

STEPS_PER_ONE: Final = float(1 << 24)
LARGEST: Final = float(1 << 14)
"""Limit of a state's numbers. Ordinary numbers are below 100; 2^24 tokens of the largest fit into 63 bits."""

Project = Callable[[NDArray[np.float64]], bytes]


def unit_vector(vector: NDArray[np.float64]) -> bytes:
    length = float(np.sqrt(np.dot(vector, vector)))
    return (vector / length if length > 0.0 else vector).astype("<f4").tobytes()


class PromptPool:
    """The pooled state of one sequence, from its first token on."""

    __slots__ = ("_sum", "_tokens", "failed", "kind", "labels", "project")

    def __init__(self, kind: Pooling, labels: tuple[int, ...] = ()) -> None:
        self.kind = kind
        self.labels = labels
        "Tokens or classes whose logits are returned instead of the vector (SamplingParams.label_ids)."
        self.project: Project = unit_vector
        "Converts the pooled state to the answer. An executor replaces it if there are labels."
        self.failed = False
        "Whether some states were not finite. Results of later launched steps are ignored then."
        self._sum: Int64s | None = None
        self._tokens = 0

    def add(self, begin: int, states: Floats, *, last: bool) -> bytes:
        """Add the states of a part of the prompt, [tokens, width] from position `begin` on. Returns the vector at the end of
        the prompt, else empty bytes."""
        tokens = len(states)
        if self.kind == "last":
            return self.project(states[-1].astype(np.float64)) if last else b""
        if self.kind == "cls":
            states = states[:1]
        steps = np.rint(np.clip(states.astype(np.float64), -LARGEST, LARGEST) * STEPS_PER_ONE)
        return self.add_sum(begin, tokens, steps.astype(np.int64).sum(0), last=last)

    def add_sum(self, begin: int, tokens: int, total: Int64s, *, last: bool) -> bytes:
        """Add a sum of states in steps, as add() does; for "cls" and "last" only the first or last state."""
        if self.kind == "last":
            return self.project(total / STEPS_PER_ONE) if last else b""
        if begin == 0:
            self._sum, self._tokens = np.zeros_like(total), 0
        if self._sum is None or begin != self._tokens:
            raise ValueError(f"a chunk of a prompt begins at {begin} and {self._tokens} tokens were pooled")
        if self.kind == "mean" or begin == 0:
            self._sum += total
        self._tokens += tokens
        return self.project(self._sum / (STEPS_PER_ONE * self._tokens)) if last else b""


class PromptPart(NamedTuple):
    """The part of a pooled prompt that a step computes."""

    place: int
    "Batch index of the sequence."
    pool: PromptPool
    row: int
    "First row in the batch."
    begin: int
    "Position of that row's token."
    tokens: int
    last: bool
    "Whether the prompt ends in this part."


def prompt_parts(
    batch: FlatBatch, pools: list[tuple[int, PromptPool]], slots: Int64s, sequences: InputBatch
) -> Iterator[PromptPart]:
    """Parts of pooled prompts in a batch, without tokens after the prompt. pools: by batch index."""
    spans = batch.spans
    for place, pool in pools:
        begin, row = int(spans.contexts[place]), int(spans.starts[place])
        tokens = int(sequences.prompt_tokens[int(slots[place])])
        end = min(begin + int(spans.starts[place + 1]) - row, tokens)
        if begin < end:
            yield PromptPart(place, pool, row, begin, end - begin, end == tokens)


def normed(hidden: Floats, weight: Floats, eps: float, *, centred: bool = False, bias: Floats | None = None) -> Floats:
    """The model's last norm, row by row, so that a row's result is independent of others. `centred`: LayerNorm."""
    wide = hidden.astype(np.float64)
    if centred:
        wide -= np.array([row.mean() for row in wide])[:, None]
    scale = np.array([1.0 / np.sqrt(np.dot(row, row) / len(row) + eps) for row in wide])
    states: Floats = (wide * scale[:, None] * weight + (0.0 if bias is None else bias)).astype(np.float32)
    return states
