"""Drafts from a smaller model with the same vocabulary, which computes in the same worker, with a KV pool of its own.

    round 1    tokens that its pool lacks, and the last one     d1       one pass for all sequences; prompts in parts
    round 2    d1                                               d2       one row for each sequence
    round k    d(k-1)                                           dk

The likeliest token is the draft: the main model verifies it, whatever it is. Block b of the draft's pool is for the tokens of
the main pool's block b, so there is nothing to allocate (draft_kv.py has what is in it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np

from baton.kvpool.base import Pool
from baton.protocol.progress import ProgressWord
from baton.worker.arrays import Int32s, Int64s
from baton.worker.drafters.draft_kv import DraftKV
from baton.worker.flat_batch import FlatBatch, Spans
from baton.worker.forward.base import Forward
from baton.worker.input_batch import InputBatch

ROWS_MAX: Final = 256
"""Maximum of rows in round 1, so that a long prompt delays the other sequences for no longer than this."""


class Part(NamedTuple):
    """Tokens of a sequence that round 1 computes."""

    slot: int
    begin: int
    end: int


class ModelDrafter:
    def __init__(self, forward: Forward, pool: Pool, *, slots: int, vocabulary: int) -> None:
        """`pool`: the pool that `forward` is bound to; both are closed with the drafter. `vocabulary`: width of the main
        model's head; the draft model's may differ."""
        self._forward = forward
        self._pool = pool
        self._vocabulary = vocabulary
        self._kv = DraftKV(slots=slots, blocks=pool.blocks, block_size=pool.layout.block_size)
        self.passed: Callable[[int, float], None] = lambda rows, seconds: None
        "Callback with the rows and seconds of each pass."

    @property
    def context_tokens(self) -> int:
        """Maximum length of a sequence with drafts."""
        return self._forward.config.context_tokens_max

    def assign_slot(self, slot: int) -> None:
        """Forget the slot's earlier sequence: it has another one now."""
        self._kv.assign_slot(slot)

    def rooms(self, most: Mapping[int, int], sequences: InputBatch) -> dict[int, int]:
        """The numbers of drafts by slot, or fewer where the draft model's context ends; without those that have no room. The
        last draft is not computed."""
        end = self.context_tokens + 1
        rooms = {slot: min(count, end - int(sequences.lengths[slot])) for slot, count in most.items()}
        return {slot: room for slot, room in rooms.items() if room > 0}

    def behind(self, slot: int, sequences: InputBatch) -> int:
        """Number of tokens of the sequence that must be computed before its first draft; at least the last one."""
        length = int(sequences.lengths[slot])
        return length - min(length - 1, self._kv.valid(slot, sequences.tokens[slot, :length], sequences.tables[slot]))

    def propose_all(self, wanted: Mapping[int, int], sequences: InputBatch, rows: int = ROWS_MAX) -> dict[int, list[int]]:
        """Propose up to so many drafts by slot, behind the known tokens. Sequences whose tokens do not fit into `rows` have
        none, and are computed in part."""
        wanted = self.rooms(wanted, sequences)
        parts = self._parts(wanted, sequences, rows)
        if not parts:
            return {}
        tokens = [sequences.tokens[part.slot, part.begin : part.end] for part in parts]
        likeliest = self._likeliest(_flat(tokens, parts, sequences.tables, self._width))
        for part, these in zip(parts, tokens, strict=True):
            self._kv.write(part.slot, sequences.tables[part.slot], part.begin, these)
        found: dict[int, list[int]] = {}
        for part, token in zip(parts, likeliest, strict=True):
            if part.end == sequences.lengths[part.slot] and 0 <= token < self._vocabulary:
                found[part.slot] = [token]
        self._later_rounds(found, wanted, sequences)
        return found

    def report_progress(self, word: ProgressWord) -> None:
        self._forward.report_progress(word)

    def close(self) -> None:
        """Releases the pool."""
        self._forward.close()
        self._pool.close()

    @property
    def _width(self) -> int:
        return self._forward.config.vocab_size

    def _parts(self, wanted: Mapping[int, int], sequences: InputBatch, rows: int) -> list[Part]:
        """Parts of sequences for round 1. Sequences that lack the fewest tokens come first."""
        behind = sorted((self.behind(slot, sequences), slot) for slot in wanted)
        parts = []
        for lacking, slot in behind:
            begin = int(sequences.lengths[slot]) - lacking
            count = min(lacking, rows)
            rows -= count
            if count:
                parts.append(Part(slot, begin, begin + count))
        return parts

    def _later_rounds(self, found: dict[int, list[int]], wanted: Mapping[int, int], sequences: InputBatch) -> None:
        """Run the rounds after the first: one more draft per round for each slot that wants one. Appends to `found`."""
        going = [slot for slot in found if wanted[slot] > 1]
        while going:
            parts = []
            for slot in going:
                at = int(sequences.lengths[slot]) + len(found[slot]) - 1
                parts.append(Part(slot, at, at + 1))
            drafts = [np.array(found[slot][-1:], np.int32) for slot in going]
            likeliest = self._likeliest(_flat(drafts, parts, sequences.tables, self._width))
            for part, draft, token in zip(parts, drafts, likeliest, strict=True):
                self._kv.write(part.slot, sequences.tables[part.slot], part.begin, draft)
                if 0 <= token < self._vocabulary:
                    found[part.slot].append(token)
                else:
                    going.remove(part.slot)
            going = [slot for slot in going if len(found[slot]) < wanted[slot]]

    def _likeliest(self, flat: FlatBatch) -> list[int]:
        """A token for each sequence, or an error code below 0."""
        began = perf_counter()
        hidden = self._forward.hidden(flat)
        tokens: list[int] = self._forward.likeliest(hidden[flat.last_rows]).tolist()
        self.passed(len(flat.token_ids), perf_counter() - began)
        return tokens


def _flat(tokens: list[Int32s], parts: list[Part], tables: Int32s, vocabulary: int) -> FlatBatch:
    """The flat batch of these parts. `vocabulary`: of the draft model. A token that it lacks is read as the first one: only
    drafts suffer."""
    begins: Int64s = np.array([part.begin for part in parts], np.int64)
    counts = np.array([part.end - part.begin for part in parts], np.int64)
    starts: Int64s = np.zeros(len(parts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    ids: Int32s = np.concatenate(tokens)
    ids = np.where(ids < vocabulary, ids, np.int32(0))
    positions = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], counts)
    slots = np.array([part.slot for part in parts], np.int64)
    return FlatBatch(Spans(tables, slots, starts, begins), ids, positions, np.ones(len(parts), np.bool_))
