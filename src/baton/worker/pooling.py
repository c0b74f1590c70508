"""One vector for a whole prompt: the mean of its hidden states after the last norm, the last or the first one, of length 1.

A prompt comes in chunks, and which chunks depends on what else runs, and on preemptions. A sum of floats would depend on them
too. So the states are summed as integers, in steps of 2^-24: the sum is exact, and the vector has the same bits however the
prompt was cut, as far as its hidden states have. On a GPU they are summed there (cuda/kernels/pool_rows.py).
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
"""Beyond it a state is cut off. Ordinary ones are below 100; so 2^24 tokens of the largest fit into 63 bits."""

Project = Callable[[NDArray[np.float64]], bytes]


def of_length_one(vector: NDArray[np.float64]) -> bytes:
    length = float(np.sqrt(np.dot(vector, vector)))
    return (vector / length if length > 0.0 else vector).astype("<f4").tobytes()


class PromptPool:
    """Of one sequence, from its first token on."""

    __slots__ = ("_sum", "_tokens", "failed", "kind", "labels", "project")

    def __init__(self, kind: Pooling, labels: tuple[int, ...] = ()) -> None:
        self.kind = kind
        self.labels = labels
        "Tokens or classes whose logits are the answer, in place of the vector (SamplingParams.label_ids)."
        self.project: Project = of_length_one
        "Makes the answer of the pooled state. An executor replaces it where there are labels."
        self.failed = False
        "Some of it was not finite. What was launched meanwhile counts for nothing."
        self._sum: Int64s | None = None
        self._tokens = 0

    def add(self, begin: int, states: Floats, *, last: bool) -> bytes:
        """`states`: [tokens, width] from position `begin` on. The vector, where this is the end of the prompt."""
        tokens = len(states)
        if self.kind == "last":
            return self.project(states[-1].astype(np.float64)) if last else b""
        if self.kind == "cls":
            states = states[:1]
        steps = np.rint(np.clip(states.astype(np.float64), -LARGEST, LARGEST) * STEPS_PER_ONE)
        return self.add_sum(begin, tokens, steps.astype(np.int64).sum(0), last=last)

    def add_sum(self, begin: int, tokens: int, total: Int64s, *, last: bool) -> bytes:
        """As add(), with the sum of so many states in steps; of the first or last one alone where that is wanted."""
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
    """Of a prompt that is pooled: what a step computes of it."""

    place: int
    "Of its sequence in the batch."
    pool: PromptPool
    row: int
    "Its first row in the batch."
    begin: int
    "The position of that row's token."
    tokens: int
    last: bool
    "The prompt ends here."


def prompt_parts(
    batch: FlatBatch, pools: list[tuple[int, PromptPool]], slots: Int64s, sequences: InputBatch
) -> Iterator[PromptPart]:
    """Tokens after the prompt are nobody's business. pools: by place in the batch."""
    spans = batch.spans
    for place, pool in pools:
        begin, row = int(spans.contexts[place]), int(spans.starts[place])
        tokens = int(sequences.prompt_tokens[int(slots[place])])
        end = min(begin + int(spans.starts[place + 1]) - row, tokens)
        if begin < end:
            yield PromptPart(place, pool, row, begin, end - begin, end == tokens)


def normed(hidden: Floats, weight: Floats, eps: float, *, centred: bool = False, bias: Floats | None = None) -> Floats:
    """The model's last norm, row by row: a row does not know of the others. `centred`: of a LayerNorm."""
    wide = hidden.astype(np.float64)
    if centred:
        wide -= np.array([row.mean() for row in wide])[:, None]
    scale = np.array([1.0 / np.sqrt(np.dot(row, row) / len(row) + eps) for row in wide])
    states: Floats = (wide * scale[:, None] * weight + (0.0 if bias is None else bias)).astype(np.float32)
    return states
