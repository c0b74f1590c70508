"""What sits in each slot, and the flat batch of a step.

A slot's tokens and block table are rows of two matrices, its lengths entries of a few columns, so a step is cut out of
them by indexing: no loop over tokens, none over context, whatever mix of chunks and decodes it is. Attention is given
the matrix of tables itself.

tokens    |----- prompt -----|-- outputs --|     lengths
computed  |---- in the pool ----|
run                             |-count-|        at the end of the tokens: a new one is sampled

A plan that contradicts what is here is a ProtocolError: one side has lost track, and the engine restarts the worker.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from baton.errors import ProtocolError
from baton.protocol.ids import BlockId, Incarnation, Slot
from baton.protocol.step import NewSequence, Run
from baton.worker.arrays import Int32s, Int64s
from baton.worker.flat_batch import FlatBatch, Spans

EMPTY = -1
"""Incarnation of an empty slot."""


class InputBatch:
    def __init__(self, *, slots: int, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.incarnations: Int64s = np.full(slots, EMPTY, np.int64)
        self.tokens: Int32s = np.zeros((slots, 64), np.int32)
        self.lengths: Int64s = np.zeros(slots, np.int64)
        self.prompt_tokens: Int64s = np.zeros(slots, np.int64)
        self.computed: Int64s = np.zeros(slots, np.int64)
        self.tables: Int32s = np.zeros((slots, 8), np.int32)
        self.table_lengths: Int64s = np.zeros(slots, np.int64)

    # What a plan changes, in its order

    def drop(self, slot: Slot, incarnation: Incarnation) -> None:
        if not self._is_slot(slot) or self.incarnations[slot] != incarnation:
            raise ProtocolError(f"the plan drops {slot}.{incarnation}, which is not there")
        self.incarnations[slot] = EMPTY

    def seat(self, new: NewSequence) -> None:
        slot, known, held = new.slot, len(new.tokens), len(new.blocks)
        if not self._is_slot(slot) or self.incarnations[slot] != EMPTY:
            raise ProtocolError(f"the plan seats a sequence in slot {slot}, which is taken or does not exist")
        if not 0 <= new.computed_tokens < known or not 1 <= new.prompt_tokens <= known:
            raise ProtocolError(f"slot {slot}: {new.computed_tokens} of {known} tokens cannot be computed already")
        if known > held * self.block_size:
            raise ProtocolError(f"slot {slot}: {known} tokens do not fit into {held} blocks of {self.block_size}")
        self._check_blocks(slot, new.blocks)
        self.tokens = _widened(self.tokens, known + 1)
        self.tables = _widened(self.tables, held)
        self.tokens[slot, :known] = new.tokens
        self.tables[slot, :held] = new.blocks
        self.incarnations[slot] = new.incarnation
        self.lengths[slot] = known
        self.prompt_tokens[slot] = new.prompt_tokens
        self.computed[slot] = new.computed_tokens
        self.table_lengths[slot] = held

    def grow(self, slot: Slot, block: BlockId) -> None:
        self._check_blocks(slot, (block,))
        place = int(self.table_lengths[self._taken(slot)])
        self.tables = _widened(self.tables, place + 1)
        self.tables[slot, place] = block
        self.table_lengths[slot] = place + 1

    def fold(self, slot: Slot, place: int, block: BlockId) -> None:
        self._check_blocks(slot, (block,))
        if not 0 <= place < self.table_lengths[self._taken(slot)]:
            raise ProtocolError(f"the plan folds entry {place} of slot {slot}, which has {self.table_lengths[slot]} blocks")
        self.tables[slot, place] = block

    # A step

    def slots_of(self, run: Run) -> Int64s:
        """The slots that run, as an index. Each is taken and appears once."""
        slots = np.array(run.slots, np.int64)
        if len(run.counts) != len(slots) or (slots.size and not 0 <= slots.min() <= slots.max() < len(self.incarnations)):
            raise ProtocolError("the plan's run names slots that do not exist, or has columns of different length")
        if (self.incarnations[slots] == EMPTY).any() or np.unique(slots).size != slots.size:
            raise ProtocolError("the plan runs an empty slot, or one slot twice")
        return slots

    def flatten(self, slots: Int64s, counts: Int64s) -> FlatBatch:
        """The next `counts` tokens of these slots."""
        contexts = self.computed[slots]
        ends = contexts + counts
        wrong = (counts < 1) | (ends > self.lengths[slots]) | (ends > self.table_lengths[slots] * self.block_size)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ProtocolError(
                f"slot {slots[at]} cannot run {counts[at]} tokens past {contexts[at]}: it has {self.lengths[slots[at]]} "
                f"tokens and {self.table_lengths[slots[at]]} blocks of {self.block_size}"
            )
        starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        # Row r of a sequence that starts at s with context c is its token c + (r - s).
        positions = np.arange(starts[-1]) + np.repeat(contexts - starts[:-1], counts)
        token_ids = self.tokens[np.repeat(slots, counts), positions]
        return FlatBatch(
            spans=Spans(self.tables, slots, starts, contexts),
            token_ids=token_ids,
            positions=positions,
            due=ends == self.lengths[slots],
        )

    def advance(self, slots: Int64s, counts: Int64s) -> None:
        """The step is computed."""
        self.computed[slots] += counts

    def append(self, slots: Int64s, tokens: Int64s) -> None:
        """One sampled token for each of these slots."""
        places = self.lengths[slots]
        if slots.size:
            self.tokens = _widened(self.tokens, int(places.max()) + 1)
        self.tokens[slots, places] = tokens
        self.lengths[slots] = places + 1

    def outputs(self, slot: int) -> Int32s:
        return self.tokens[slot, self.prompt_tokens[slot] : self.lengths[slot]]

    # Checks

    def _is_slot(self, slot: int) -> bool:
        return 0 <= slot < len(self.incarnations)

    def _taken(self, slot: Slot) -> Slot:
        if not self._is_slot(slot) or self.incarnations[slot] == EMPTY:
            raise ProtocolError(f"the plan changes the table of slot {slot}, which is empty")
        return slot

    def _check_blocks(self, slot: Slot, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            if not 0 <= block < self.blocks:
                raise ProtocolError(f"slot {slot}: block {block} is not one of the pool's {self.blocks}")


def _widened(matrix: Int32s, columns: int) -> Int32s:
    """At least so many columns. Doubling keeps the cost of a token constant."""
    rows, have = matrix.shape
    if columns <= have:
        return matrix
    wider = np.zeros((rows, max(columns, 2 * have)), np.int32)
    wider[:, :have] = matrix
    return wider
