"""The content of each slot, and the flat batch of a step.

A slot's tokens and block table are rows of two matrices, its lengths entries of a few columns, so a step is built by indexing:
no loop over tokens or context, for any mix of chunks and decodes. Attention reads the matrix of tables itself.

tokens    |----- prompt -----|-- outputs --|     lengths
computed  |---- in the pool ----|
run                             |-count-|        at the end of the tokens: a new one is sampled

Lengths do not wait for values: when a step is launched, each due sequence grows by a token whose value is FEEDBACK until the
step is collected. A step that runs such a token contains FEEDBACK, and the executor has the value.

A plan that contradicts this state raises ProtocolError: the two sides disagree, and the engine restarts the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from baton.errors import ProtocolError
from baton.protocol.ids import BlockId, Incarnation, Slot
from baton.protocol.step import BatchRows, NewSequence
from baton.worker.arrays import Bools, Int32s, Int64s
from baton.worker.flat_batch import FEEDBACK, DraftLayout, FlatBatch, Spans

EMPTY = -1
"""Incarnation of an empty slot."""
NONE: Int64s = np.zeros(0, np.int64)


class BatchLayout:
    """Sequences and their token counts. Steps with the same ones, as in decoding, share the object."""

    __slots__ = ("_drafted", "counts", "flat", "listed", "singles", "slots", "starts")

    def __init__(self, slots: Int64s, counts: Int64s) -> None:
        self.slots = slots
        self.listed: list[int] = slots.tolist()
        "The slots."
        self.counts = counts
        self.starts: Int64s = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(counts, out=self.starts[1:])
        self.singles = int(self.starts[-1]) == len(slots)
        "Whether all sequences have one token each."
        self.flat: FlatBatch | None = None
        "Arrays of their last step, if all have one token each."
        self._drafted: tuple[list[int], DraftLayout] | None = None
        "Number of drafts of each sequence in their last step with drafts, and its rows."

    def drafted(self, drafts: list[int]) -> DraftLayout:
        """The rows with that many drafts behind each sequence. Mostly as many as in their last step."""
        if self._drafted is None or self._drafted[0] != drafts:
            self._drafted = drafts, DraftLayout.of(self.slots, self.counts, np.array(drafts, np.int64))
        return self._drafted[1]


class InputBatch:
    def __init__(self, *, slots: int, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.incarnations: Int64s = np.full(slots, EMPTY, np.int64)
        self.tokens: Int32s = np.zeros((slots, 64), np.int32)
        self.tables: Int32s = np.zeros((slots, 8), np.int32)
        self._numbers: Int64s = np.zeros((3, slots), np.int64)
        "The next three columns, which a step reads at once, by `take`: indexing would return rows that are not contiguous."
        self.lengths: Int64s = self._numbers[0]
        self.computed: Int64s = self._numbers[1]
        self.rooms: Int64s = self._numbers[2]
        "Tokens that each slot's blocks hold; `tokens` is wide enough for them and one more."
        self.prompt_tokens: Int64s = np.zeros(slots, np.int64)
        self._table_changes: dict[int, int] = {}
        "Slot -> first changed place of its table since take_table_changes."

    # Plan changes, in their order

    def drop(self, slot: Slot, incarnation: Incarnation) -> None:
        if not self._is_slot(slot) or self.incarnations[slot] != incarnation:
            raise ProtocolError(f"the plan drops {slot}.{incarnation}, which is not there")
        self.incarnations[slot] = EMPTY

    def assign_slot(self, new: NewSequence) -> None:
        """Fills an empty slot with a new sequence. Raises ProtocolError if the plan contradicts the state."""
        slot, known, held = new.slot, len(new.tokens), len(new.blocks)
        if not self._is_slot(slot) or self.incarnations[slot] != EMPTY:
            raise ProtocolError(f"the plan puts a sequence into slot {slot}, which is taken or does not exist")
        if not 0 <= new.computed_tokens < known or not 1 <= new.prompt_tokens <= known:
            raise ProtocolError(f"slot {slot}: {new.computed_tokens} of {known} tokens cannot be computed already")
        if known > held * self.block_size:
            raise ProtocolError(f"slot {slot}: {known} tokens do not fit into {held} blocks of {self.block_size}")
        self._check_blocks(slot, new.blocks)
        self._make_room(slot, held)
        self.tokens[slot, :known] = new.tokens
        self.tables[slot, :held] = new.blocks
        self._table_changes[slot] = 0
        self.incarnations[slot] = new.incarnation
        self.lengths[slot] = known
        self.prompt_tokens[slot] = new.prompt_tokens
        self.computed[slot] = new.computed_tokens

    def grow(self, slot: Slot, block: BlockId) -> None:
        self._check_blocks(slot, (block,))
        place = self._held(slot)
        self._make_room(slot, place + 1)
        self.tables[slot, place] = block
        self._note_change(slot, place)

    def fold(self, slot: Slot, place: int, block: BlockId) -> None:
        self._check_blocks(slot, (block,))
        held = self._held(slot)
        if not 0 <= place < held:
            raise ProtocolError(f"the plan folds entry {place} of slot {slot}, which has {held} blocks")
        self.tables[slot, place] = block
        self._note_change(slot, place)

    @property
    def has_table_changes(self) -> bool:
        return bool(self._table_changes)

    def take_table_changes(self) -> tuple[Int64s, Int64s, Int64s]:
        """Slots, places and blocks of all table entries changed since the last call: for executors with a copy."""
        slots, places, blocks = [], [], []
        for slot, first in self._table_changes.items():
            held = int(self.rooms[slot]) // self.block_size
            slots.append(np.full(held - first, slot))
            places.append(np.arange(first, held))
            blocks.append(self.tables[slot, first:held])
        self._table_changes.clear()
        if not slots:
            return NONE, NONE, NONE
        return np.concatenate(slots), np.concatenate(places), np.concatenate(blocks).astype(np.int64)

    def _note_change(self, slot: Slot, place: int) -> None:
        self._table_changes[slot] = min(place, self._table_changes.get(slot, place))

    def _make_room(self, slot: Slot, blocks: int) -> None:
        tokens = blocks * self.block_size
        self.tables = _widened(self.tables, blocks)
        self.tokens = _widened(self.tokens, tokens + 1)
        self.rooms[slot] = tokens

    # A step

    def check_run(self, run: BatchRows) -> None:
        """Raises ProtocolError unless each slot is occupied and appears once, with at least one token."""
        if len(run.counts) != len(run.slots) or not all(map(self._is_slot, run.slots)):
            raise ProtocolError("the plan's run names slots that do not exist, or has columns of different length")
        if (self.incarnations[list(run.slots)] == EMPTY).any() or len(set(run.slots)) != len(run.slots):
            raise ProtocolError("the plan runs an empty slot, or one slot twice")
        if min(run.counts, default=1) < 1:
            raise ProtocolError(f"the plan runs {min(run.counts)} tokens of a slot")

    def flatten(self, layout: BatchLayout) -> FlatBatch:
        """The next tokens of these sequences. Raises ProtocolError."""
        slots, counts, starts = layout.slots, layout.counts, layout.starts
        lengths, contexts, rooms = self._numbers.take(slots, axis=1)
        ends = contexts + counts
        _check_fit(layout, lengths, contexts, rooms, ends)
        due: Bools = ends == lengths
        if layout.singles:
            return self._flatten_singles(layout, contexts, due)
        # Row r of a sequence that starts at s with context c is its token c + (r - s).
        positions = np.arange(starts[-1]) + np.repeat(contexts - starts[:-1], counts)
        token_ids = self.tokens[np.repeat(slots, counts), positions]
        return FlatBatch(Spans(self.tables, slots, starts, contexts), token_ids, positions, due)

    def flatten_drafted(self, layout: BatchLayout, drafts: Mapping[int, Sequence[int]]) -> FlatBatch:
        """The next tokens, as of `flatten`, with draft tokens behind some sequences, by their place in the layout: only behind
        the last known token. The drafts are written behind the known tokens, where accepted ones are later found."""
        slots, counts = layout.slots, [0] * len(layout.listed)
        for place, draft in drafts.items():
            counts[place] = len(draft)
        rows = layout.drafted(counts)
        lengths, contexts, rooms = self._numbers.take(slots, axis=1)
        ends = contexts + layout.counts
        due: Bools = ends == lengths
        if not (due & (lengths + rows.drafts <= rooms)).all():
            _check_fit(layout, lengths, contexts, rooms, ends)
            wrong = (rows.drafts > 0) & ((lengths + rows.drafts > rooms) | ~due)
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                raise ProtocolError(f"slot {slots[at]} has no room for {counts[at]} drafts behind {lengths[at]} tokens")
        behind = lengths.tolist()
        for place, draft in drafts.items():
            self.tokens[layout.listed[place], behind[place] : behind[place] + len(draft)] = draft
        positions = contexts[rows.places] + rows.behind
        return FlatBatch(
            Spans(self.tables, slots, rows.starts, contexts), self.tokens[rows.slots, positions], positions, due, rows
        )

    def _flatten_singles(self, layout: BatchLayout, contexts: Int64s, due: Bools) -> FlatBatch:
        """Reuses the arrays of their last step, so that cached addresses stay valid."""
        slots, flat = layout.slots, layout.flat
        token_ids = self.tokens[slots, contexts]
        if flat is None or flat.spans.tables is not self.tables:
            spans = Spans(self.tables, slots, layout.starts, contexts)
            layout.flat = flat = FlatBatch(spans, token_ids, contexts, due)
        else:
            flat.positions[:], flat.token_ids[:], flat.due[:] = contexts, token_ids, due
        return flat

    def advance(self, layout: BatchLayout, due: Int64s) -> Int64s:
        """Marks the tokens as computed, and appends a token to the slots in `due`. Returns the positions of these tokens."""
        self.computed[layout.slots] += layout.counts
        places = self.lengths[due]
        self.tokens[due, places] = FEEDBACK
        self.lengths[due] = places + 1
        return places

    def learn(self, slots: Int64s, places: Int64s, tokens: Int64s) -> None:
        """Stores the values of tokens that were appended by `advance`."""
        self.tokens[slots, places] = tokens

    def accept(self, accepted: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        """Stores accepted drafts and the token after them, by slot: from the position on that `advance` returned."""
        for slot, (place, tokens) in accepted.items():
            self.tokens[slot, place : place + len(tokens)] = tokens
        slots = np.array(list(accepted), np.int64)
        more = np.array([len(tokens) - 1 for _, tokens in accepted.values()], np.int64)
        self.lengths[slots] += more
        self.computed[slots] += more

    def output_counts(self, slots: Int64s) -> Int64s:
        counts: Int64s = self.lengths[slots] - self.prompt_tokens[slots]
        return counts

    def outputs(self, slot: int) -> Int32s:
        return self.tokens[slot, self.prompt_tokens[slot] : self.lengths[slot]]

    # Checks

    def _is_slot(self, slot: int) -> bool:
        return 0 <= slot < len(self.incarnations)

    def _held(self, slot: Slot) -> int:
        """Number of blocks of the sequence. Raises ProtocolError for an empty slot."""
        if not self._is_slot(slot) or self.incarnations[slot] == EMPTY:
            raise ProtocolError(f"the plan changes the table of slot {slot}, which is empty")
        return int(self.rooms[slot]) // self.block_size

    def _check_blocks(self, slot: Slot, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            if not 0 <= block < self.blocks:
                raise ProtocolError(f"slot {slot}: block {block} is not one of the pool's {self.blocks}")


def _check_fit(layout: BatchLayout, lengths: Int64s, contexts: Int64s, rooms: Int64s, ends: Int64s) -> None:
    """Raises ProtocolError unless each sequence has the tokens and the blocks up to its end."""
    wrong = ends > np.minimum(lengths, rooms)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise ProtocolError(
            f"slot {layout.slots[at]} cannot run {layout.counts[at]} tokens past {contexts[at]}: it has {lengths[at]} "
            f"tokens and blocks for {rooms[at]}"
        )


def _widened(matrix: Int32s, columns: int) -> Int32s:
    """The array with at least this many columns. Doubling keeps the amortised cost per token constant."""
    rows, have = matrix.shape
    if columns <= have:
        return matrix
    wider = np.zeros((rows, max(columns, 2 * have)), np.int32)
    wider[:, :have] = matrix
    return wider
