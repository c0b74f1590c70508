"""The inputs of a step: numpy arrays on the host, packed into one run of int32, copied to the device at once, and viewed there
as one tensor per array.

decode   a row is a sequence; padded to `bucket` rows, so the offsets are the same in every step and a graph can read them
mixed    chunks of prompts among the rows; offsets differ from step to step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.cuda.kernels.attention_decode import FIXED_SPLIT_TOKENS, split_tokens_for
from baton.worker.cuda.kernels.attention_prefill import prefill_tiles
from baton.worker.draft_rows import DraftCounts
from baton.worker.step_rules import Bans
from baton.worker.token_masks import Masks

Ints = NDArray[np.int32]
DECODE_COLUMNS = ("token_ids", "positions", "row_slots", "tallies", "outputs", "order")
DECODE_PADDING: Ints = np.array([[0], [-1], [-1], [-1], [0]], np.int32)
"""Padding of these columns, except for `order`."""
SUM, MAXIMUM = np.add.reduce, np.maximum.reduce
EVEN_FACTOR = 1.25
"""Maximum length of about equally long sequences, relative to the average."""
ALIGNED = 4
"""Alignment of arrays in ints: 16 bytes, as the kernels assume."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of prompts with requested log-probabilities. [prompt rows] each."""

    rows: Ints
    tokens: Ints
    "The tokens that follow these rows."
    top_logprobs: Ints
    "Number of top log-probabilities."


@dataclass(slots=True)
class StepBatch:
    """One step. As in flat_batch.py the rows of sequence s are starts[s] to starts[s + 1]. Never changed, but not frozen: that
    takes three times as long to make, and the device may be idle."""

    token_ids: NDArray[np.integer]
    "[rows]; embed.FEEDBACK for the token that the row's slot sampled in the previous step."
    slots: NDArray[np.integer]
    "[sequences] slot of each sequence."
    starts: NDArray[np.integer]
    "[sequences + 1] first row of each sequence."
    contexts: NDArray[np.integer]
    "[sequences] tokens in the pool before this step."
    due: NDArray[np.bool_]
    "[sequences] whether it gets a token."
    outputs: NDArray[np.integer]
    "[sequences] number of earlier output tokens: the position of a draw."
    draws: bool = True
    "Whether some sequence is not greedy. Otherwise fewer kernels are launched."
    token_logprobs: bool = False
    "Whether some sequence requests log-probabilities of its token."
    bans: Bans | None = None
    masks: Masks | None = None
    tallies: NDArray[np.integer] | None = None
    "[sequences] place of the counts of tokens (kernels/adjust.py). None: the slot."
    draft_counts: DraftCounts | None = None
    prompts: PromptRows | None = None
    pooled: Ints | None = None
    "[prompts, 2] first row and count of rows that are summed for embeddings (kernels/pool_rows.py)."
    of_prompt: NDArray[np.integer] | None = None
    """[sequences] leading rows of its prompt, which are attended to together. None: all rows of a sequence with several, none
    of a sequence with one."""

    @property
    def even(self) -> bool:
        """Whether the sequences have about equal lengths."""
        count = len(self.contexts)
        # Reductions called by their own names: the methods of an array go through Python.
        return count < 2 or int(MAXIMUM(self.contexts)) * count <= EVEN_FACTOR * int(SUM(self.contexts)) + 64

    @property
    def decodes(self) -> bool:
        """Whether this is a decode step: one row per sequence, none of a prompt, and a token for each. Then nothing is
        pooled."""
        if self.pooled is not None:
            return False
        one_each = len(self.token_ids) == len(self.slots) and bool(self.due.all())
        return one_each and (self.of_prompt is None or not self.of_prompt.any())

    @property
    def prompt_rows(self) -> NDArray[np.integer]:
        """[sequences] leading rows that are attended to together, as a prompt; the others one by one."""
        counts = np.diff(self.starts)
        return np.where(counts > 1, counts, 0) if self.of_prompt is None else self.of_prompt

    @property
    def decoded_rows(self) -> int:
        return len(self.token_ids) - int(self.prompt_rows.sum())


FEW_ROWS, LONG_CONTEXT = 16, 512


def split_few_rows(counts: NDArray[np.int64], contexts: NDArray[np.int64], decoded_max: int) -> NDArray[np.int64] | None:
    """Leading rows of prompts (StepBatch.of_prompt), without short ends. A few rows after a long context, as when all but the
    end of a prompt was cached, are one tile per kv head, and most of the chip would idle. Row by row they are split over the
    context."""
    few = (counts <= FEW_ROWS) & (contexts >= LONG_CONTEXT) | (counts == 1)
    fits = int(counts[few].sum()) <= decoded_max
    return np.where(few, 0, counts) if fits and bool((few & (counts > 1)).any()) else None


class MixedPadding(NamedTuple):
    """Padded sizes of a step with prompts."""

    rows: int
    sequences: int
    decoded: int
    "Rows that are decoded."
    tiles: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs on the device; all int32."""

    token_ids: Tensor
    positions: Tensor
    row_slots: Tensor
    order: Tensor
    "Decoded rows, longest sequence first."
    split_tokens: Tensor
    due_slots: Tensor
    tallies: Tensor
    "Places of the counts of the due rows."
    outputs: Tensor
    due_rows: Tensor | None = None
    "Rows that get a token. None: all."
    tiles: Tensor | None = None
    "Tiles of prompts. None: no prompts."
    slots: Tensor | None = None
    starts: Tensor | None = None
    contexts: Tensor | None = None


class InputPacking:
    """Arrays packed one after another into a run of int32."""

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

    def add_columns(self, names: Sequence[str], length: int) -> Ints:
        """Adds columns of one length. Returns them to be filled: [names, length]."""
        begin, apart = self.size, -(-length // ALIGNED) * ALIGNED
        self.size = begin + len(names) * apart
        for place, name in enumerate(names):
            self.places[name] = (begin + place * apart, (length,))
        return self._run[begin : self.size].reshape(len(names), apart)[:, :length]

    def views(self, run: Tensor) -> dict[str, Tensor]:
        return {name: run[begin : begin + int(np.prod(shape))].view(*shape) for name, (begin, shape) in self.places.items()}


def ints_needed(rows: int, sequences: int, rows_per_tile: int) -> int:
    """An upper bound of the packed size of a step."""
    return 6 * rows + 8 * sequences + 2 * (rows // rows_per_tile + max(sequences, rows // 8 + 1)) + 16 * ALIGNED


class DecodeInputs:
    """The places of a decode step's inputs in a run of int32. Steps of one size share the object, so nothing is sliced while
    the device may be idle."""

    __slots__ = ("_columns", "_count", "_order", "_padded", "_padding", "_split_tokens", "_values", "bucket", "packing", "size")

    def __init__(self, bucket: int, run: Ints) -> None:
        self.bucket = bucket
        self.packing = InputPacking(run)
        self._columns = self.packing.add_columns(DECODE_COLUMNS, bucket)
        place = self.packing.size
        self.packing.add("split_tokens", np.zeros(1, np.int32))
        self._split_tokens = run[place : place + 1]
        self.size = self.packing.size
        self._slice_for(0)

    def _slice_for(self, count: int) -> None:
        """Makes the views for this many sequences."""
        self._count = count
        self._values, self._order = tuple(self._columns[:-1, :count]), self._columns[-1, :count]
        self._padded = self._columns[:, count:]
        self._padding: Ints = np.empty(self._padded.shape, np.int32)
        self._padding[:-1], self._padding[-1] = DECODE_PADDING, np.arange(count, self.bucket)

    def write(self, batch: StepBatch, kv_heads: int, *, fixed: bool) -> None:
        """Writes the inputs of a step. `fixed`: splits independent of the batch."""
        contexts = batch.contexts
        count = len(contexts)
        if count != self._count:
            self._slice_for(count)
        token_ids, positions, row_slots, tallies, outputs = self._values
        token_ids[:], positions[:], row_slots[:], outputs[:] = batch.token_ids, contexts, batch.slots, batch.outputs
        tallies[:] = batch.slots if batch.tallies is None else batch.tallies
        self._order[:] = (-contexts).argsort(kind="stable") if count > 1 else 0  # longest first
        if count < self.bucket:
            self._padded[:] = self._padding
        lengths_sum = 0 if fixed else int(SUM(contexts)) + count
        self._split_tokens[0] = FIXED_SPLIT_TOKENS if fixed else split_tokens_for(lengths_sum, max(1, count), kv_heads)


def pack_decode(batch: StepBatch, bucket: int, run: Ints, kv_heads: int, *, fixed: bool) -> InputPacking:
    inputs = DecodeInputs(bucket, run)
    inputs.write(batch, kv_heads, fixed=fixed)
    return inputs.packing


def decode_views(packing: InputPacking, run: Tensor) -> StepInputs:
    views = packing.views(run)
    return StepInputs(**views, due_slots=views["row_slots"])


NO_PADDING = MixedPadding(0, 0, 0, 0)


def pack_mixed(
    batch: StepBatch, run: Ints, kv_heads: int, rows_per_tile: int, *, fixed: bool, padding: MixedPadding = NO_PADDING
) -> InputPacking:
    """Packs a step with prompts into `run`. `rows_per_tile`: of the prefill kernel. `fixed`: splits independent of the batch.
    `padding`: sizes of a recorded graph."""
    packing = InputPacking(run)
    counts = np.diff(batch.starts)
    of_row = np.repeat(np.arange(len(counts)), counts)
    in_sequence = np.arange(len(of_row)) - batch.starts[:-1][of_row]
    positions, prompt_rows = batch.contexts[of_row] + in_sequence, batch.prompt_rows
    packing.add("token_ids", batch.token_ids, padding.rows, 0)
    packing.add("positions", positions, padding.rows)
    packing.add("row_slots", batch.slots[of_row], padding.rows)
    packing.add("slots", batch.slots, padding.sequences)
    packing.add("starts", batch.starts, padding.sequences + 1)
    packing.add("contexts", batch.contexts, padding.sequences)
    decoded = np.flatnonzero(in_sequence >= prompt_rows[of_row])
    decoded = decoded[np.argsort(-positions[decoded], kind="stable")]
    packing.add("order", decoded, padding.decoded)
    packing.add("split_tokens", _split_tokens(positions[decoded] + 1, kv_heads, fixed=fixed))
    some = np.flatnonzero(prompt_rows)
    lengths, contexts = (column[some].astype(np.int64) for column in (prompt_rows, batch.contexts))
    tiles = prefill_tiles(some, lengths, contexts, rows_per_tile)
    packing.add("tiles", np.concatenate((tiles, np.full((max(0, padding.tiles - len(tiles)), 2), -1, np.int32))))
    due = np.flatnonzero(batch.due)
    packing.add("due_rows", batch.starts[1:][due] - 1)
    packing.add("due_slots", batch.slots[due])
    packing.add("outputs", batch.outputs[due])
    return packing


def tiles_of(batch: StepBatch, rows_per_tile: int) -> int:
    return int((-(-batch.prompt_rows // rows_per_tile)).sum())


def mixed_views(packing: InputPacking, run: Tensor) -> StepInputs:
    views = packing.views(run)
    return StepInputs(**views, tallies=views["due_slots"])


def _split_tokens(lengths: NDArray[np.integer], kv_heads: int, *, fixed: bool) -> Ints:
    tokens = FIXED_SPLIT_TOKENS if fixed else split_tokens_for(int(lengths.sum()), max(1, len(lengths)), kv_heads)
    return np.array([tokens], np.int32)
