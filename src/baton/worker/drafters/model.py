"""Drafts from a smaller model with the same vocabulary, which computes in the same worker, with a KV pool of its own.

The likeliest token is the draft: the main model verifies it, whatever it is. Block b of the draft's pool is for the tokens of
the main pool's block b, so there is nothing to allocate (draft_kv.py has what is in it; passes.py computes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np

from baton.kvpool.base import Pool
from baton.kvpool.pool import pool_bytes
from baton.protocol.progress import ProgressWord
from baton.worker.arrays import Bools, Int32s, Int64s
from baton.worker.drafters.draft_kv import DraftKV
from baton.worker.drafters.passes import DraftPasses, Passed
from baton.worker.flat_batch import FlatBatch, Spans
from baton.worker.input_batch import InputBatch

ROWS_MAX: Final = 256
"""Maximum of rows in round 1, so that a long prompt delays the other sequences for no longer than this."""


class Part(NamedTuple):
    """Tokens of a sequence that round 1 computes."""

    slot: int
    begin: int
    end: int


class ModelDrafter:
    def __init__(self, passes: DraftPasses, pool: Pool, *, slots: int, vocabulary: int) -> None:
        """`pool`: the pool that `passes` are bound to; both are closed with the drafter. `vocabulary`: width of the main
        model's head; the draft model's may differ."""
        self._passes = passes
        self._pool = pool
        self._vocabulary = vocabulary
        self._kv = DraftKV(slots=slots, blocks=pool.blocks, block_size=pool.layout.block_size)
        self.passed: Passed = lambda rows, seconds: None
        "Callback with the rows and seconds of each pass."
        self.meanwhile: Callable[[], None] = lambda: None
        "Callback before drafts are waited for."

    @property
    def context_tokens(self) -> int:
        """Maximum length of a sequence with drafts."""
        return self._passes.context_tokens

    @property
    def pool_bytes(self) -> int:
        return pool_bytes(self._pool.layout, self._pool.blocks)

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
        parts = self._parts(wanted, sequences, min(rows, self._passes.rows_max))
        if not parts:
            return {}
        whole = [part.end == sequences.lengths[part.slot] for part in parts]
        rounds = np.array([wanted[part.slot] * end for part, end in zip(parts, whole, strict=True)], np.int64)
        tokens = [sequences.tokens[part.slot, part.begin : part.end] for part in parts]
        flat = _flat(tokens, parts, sequences.tables, np.array(whole), self._passes.vocabulary)
        found: dict[int, list[int]] = {}
        proposed = self._passes.run(flat, rounds, self.passed, self.meanwhile)
        for part, known, drafts in zip(parts, tokens, proposed, strict=True):
            computed = np.concatenate((known, np.array(drafts[:-1], np.int32)))
            self._kv.write(part.slot, sequences.tables[part.slot], part.begin, computed)
            if valid := self._valid(drafts):
                found[part.slot] = valid
        return found

    def prepare(self) -> None:
        """Does everything that would slow down the first draft."""
        self._passes.prepare()

    def report_progress(self, word: ProgressWord) -> None:
        self._passes.report_progress(word)

    def close(self) -> None:
        """Releases the pool."""
        self._passes.close()
        self._pool.close()

    def _valid(self, drafts: list[int]) -> list[int]:
        """The drafts before the first that the main model has no token for."""
        wrong = (place for place, token in enumerate(drafts) if not 0 <= token < self._vocabulary)
        return drafts[: next(wrong, len(drafts))]

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


def _flat(tokens: list[Int32s], parts: list[Part], tables: Int32s, due: Bools, vocabulary: int) -> FlatBatch:
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
    return FlatBatch(Spans(tables, slots, starts, begins), ids, positions, due)
