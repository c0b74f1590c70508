"""What a step is told: numpy arrays on the host, packed into one run of int32, copied to the device in one go, and seen there
as one tensor for each array.

decode   a row is a sequence; padded to `bucket` rows, so the places are the same in every step and a graph can read them
mixed    chunks of prompts among the rows; places differ from step to step
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.cuda.kernels.attention_decode import FIXED_SPLIT_TOKENS, split_tokens_for
from baton.worker.cuda.kernels.attention_prefill import prefill_tiles
from baton.worker.step_rules import Bans, Masks

Ints = NDArray[np.int32]
EVEN_FACTOR = 1.25
"""The longest of sequences that are about equally long, relative to the average."""
ALIGNED = 4
"""Arrays begin at multiples of 16 bytes: kernels are compiled for that."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of prompts that somebody wants log-probabilities of. [prompt rows] each."""

    rows: Ints
    tokens: Ints
    "The token that follows."
    told: Ints
    "How many of the likeliest are told with it."


@dataclass(frozen=True, slots=True)
class StepBatch:
    """As in flat_batch.py: the rows of sequence s are starts[s] to starts[s + 1]."""

    token_ids: NDArray[np.integer]
    "[rows]; embed.FEEDBACK for the token that the row's slot sampled in the step before."
    slots: NDArray[np.integer]
    "[sequences]"
    starts: NDArray[np.integer]
    "[sequences + 1]"
    contexts: NDArray[np.integer]
    "[sequences] tokens in the pool before this step."
    due: NDArray[np.bool_]
    "[sequences] who gets a token."
    outputs: NDArray[np.integer]
    "[sequences] how many tokens of its output came before: the position of a draw."
    draws: bool = True
    "Some sequence wants more than its likeliest token. Without, less has to be launched."
    tells: bool = False
    "Some sequence wants log-probabilities of its token."
    bans: Bans | None = None
    masks: Masks | None = None
    prompts: PromptRows | None = None

    @property
    def even(self) -> bool:
        """The sequences are about equally long."""
        return int(self.contexts.max(initial=0)) * len(self.contexts) <= EVEN_FACTOR * int(self.contexts.sum()) + 64

    @property
    def decodes(self) -> bool:
        """One row for each sequence, and a token for each."""
        return len(self.token_ids) == len(self.slots) and bool(self.due.all())


@dataclass(frozen=True, slots=True)
class StepInputs:
    """On the device; all int32."""

    token_ids: Tensor
    positions: Tensor
    row_slots: Tensor
    order: Tensor
    "Rows that are decoded, longest first."
    split_tokens: Tensor
    due_slots: Tensor
    outputs: Tensor
    due_rows: Tensor | None = None
    "None: all rows."
    tiles: Tensor | None = None
    "None: no prompts."
    slots: Tensor | None = None
    starts: Tensor | None = None
    contexts: Tensor | None = None


class Packing:
    """Arrays one after another in a run of int32."""

    def __init__(self, run: Ints) -> None:
        self._run = run
        self.places: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.size = 0

    def add(self, name: str, values: NDArray[np.integer], padded: int = 0, padding: int = -1) -> None:
        begin, length = self.size, values.size
        end = begin + max(length, padded)
        self._run[begin : begin + length] = values.reshape(-1)
        self._run[begin + length : end] = padding
        self.places[name] = (begin, (max(length, padded),) if values.ndim == 1 else values.shape)
        self.size = -(-end // ALIGNED) * ALIGNED

    def views(self, run: Tensor) -> dict[str, Tensor]:
        return {name: run[begin : begin + int(np.prod(shape))].view(*shape) for name, (begin, shape) in self.places.items()}


def ints_needed(rows: int, sequences: int, rows_per_tile: int) -> int:
    """An upper bound for what a step of so many rows and sequences is packed into."""
    return 3 * rows + 7 * sequences + 2 * (rows // rows_per_tile + sequences) + 16 * ALIGNED


def pack_decode(batch: StepBatch, bucket: int, run: Ints, kv_heads: int, *, fixed: bool) -> Packing:
    packing = Packing(run)
    packing.add("token_ids", batch.token_ids, bucket, 0)
    packing.add("positions", batch.contexts, bucket)
    packing.add("row_slots", batch.slots, bucket)
    packing.add("outputs", batch.outputs, bucket, 0)
    longest_first = np.argsort(-batch.contexts, kind="stable")
    packing.add("order", np.concatenate((longest_first, np.arange(len(longest_first), bucket))))
    packing.add("split_tokens", _split_tokens(batch.contexts + 1, kv_heads, fixed=fixed))
    return packing


def decode_views(packing: Packing, run: Tensor) -> StepInputs:
    views = packing.views(run)
    return StepInputs(**views, due_slots=views["row_slots"])


def pack_mixed(batch: StepBatch, run: Ints, kv_heads: int, rows_per_tile: int, *, fixed: bool) -> Packing:
    packing = Packing(run)
    counts = np.diff(batch.starts)
    of_row = np.repeat(np.arange(len(counts)), counts)
    positions = batch.contexts[of_row] + np.arange(len(of_row)) - batch.starts[:-1][of_row]
    packing.add("token_ids", batch.token_ids)
    packing.add("positions", positions)
    packing.add("row_slots", batch.slots[of_row])
    packing.add("slots", batch.slots)
    packing.add("starts", batch.starts)
    packing.add("contexts", batch.contexts)
    single = np.flatnonzero(counts == 1)
    single = single[np.argsort(-batch.contexts[single], kind="stable")]
    packing.add("order", batch.starts[single])
    packing.add("split_tokens", _split_tokens(batch.contexts[single] + 1, kv_heads, fixed=fixed))
    several = np.flatnonzero(counts > 1)
    packing.add("tiles", prefill_tiles(several, counts[several], batch.contexts[several].astype(np.int64), rows_per_tile))
    due = np.flatnonzero(batch.due)
    packing.add("due_rows", batch.starts[1:][due] - 1)
    packing.add("due_slots", batch.slots[due])
    packing.add("outputs", batch.outputs[due])
    return packing


def mixed_views(packing: Packing, run: Tensor) -> StepInputs:
    return StepInputs(**packing.views(run))


def _split_tokens(lengths: NDArray[np.integer], kv_heads: int, *, fixed: bool) -> Ints:
    tokens = FIXED_SPLIT_TOKENS if fixed else split_tokens_for(int(lengths.sum()), max(1, len(lengths)), kv_heads)
    return np.array([tokens], np.int32)
