"""A step with drafts on a device that samples: every row is sampled at once, as if the drafts before it were right.

    rows        t  d1  d2  d3      each a sequence of its own for the device: same slot, next position
    sampled     s1 s2  s3  s4      s2 with penalties, excluded tokens and draw as if d1 had been sampled
    accepted    s1 s2              if s1 = d1 and s2 != d2; what was sampled behind it is ignored

The state of a sequence does not change before the result is known (`consume`), so nothing is rolled back. Excluded tokens of a
row are computed on the host, counts of tokens on the device, in a copy per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from baton.worker.arrays import Int32s, Int64s
from baton.worker.executors.base import Sampled
from baton.worker.failure import Failure
from baton.worker.flat_batch import DraftLayout, FlatBatch
from baton.worker.sampling_batch import SamplingBatch
from baton.worker.step_rules import Bans, bans_from, only
from baton.worker.token_masks import Masks, masks_of


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of tokens of draft rows whose sequence has penalties: those of the slot, and the drafts before the row."""

    places: Int64s
    "[rows] place of the row's counts."
    slots: Int64s
    "[rows] slot of the row's sequence."
    tokens: Int64s
    "[2, tokens]: index into the flat counts, and how often the token is a draft before the row. No index occurs twice."


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of a step with drafts. Every sequence is due, and has one row of its own."""

    batch: FlatBatch
    sampling: SamplingBatch
    layout: DraftLayout

    @property
    def places(self) -> Int64s:
        """[rows] batch index of the row's sequence."""
        return self.layout.places

    @property
    def ahead(self) -> Int64s:
        """[rows] drafts before the row."""
        return self.layout.behind

    @property
    def slots(self) -> Int64s:
        """[rows] slot of the row's sequence."""
        return self.layout.slots

    def outputs(self, row: int) -> Int32s:
        """Output tokens before the row's token, drafts included."""
        sequences, slot = self.sampling.sequences, int(self.sampling.slots[self.places[row]])
        return sequences.tokens[slot, sequences.prompt_tokens[slot] : sequences.lengths[slot] + self.ahead[row]]

    def rules(self, vocabulary: int) -> tuple[Bans | None, Masks | None]:
        """Excluded tokens of each row."""
        if not (self.sampling.excludes or self.sampling.forces):
            return None, None
        states = self.sampling.states
        masks: dict[int, NDArray[np.uint32]] = {}
        pairs: list[Int32s | None] = []
        grammars: dict[int, list[NDArray[np.uint32]]] = {}
        for row, (place, ahead) in enumerate(zip(self.places.tolist(), self.ahead.tolist(), strict=True)):
            state = states[place]
            if state.grammar is not None:
                if not ahead:
                    grammars[place] = state.grammar.masks_ahead(self._drafts(row), vocabulary)
                masks[row] = grammars[place][ahead]
            outputs = self.outputs(row)
            pairs.append(state.bans(outputs, masks.get(row)) if state.excluded else None)
            if (token := state.forced(outputs, drafts=ahead > 0)) is not None:
                masks[row] = only(token, vocabulary)
        return bans_from(pairs), masks_of(masks, np.arange(len(self.places)))

    def _drafts(self, first: int) -> list[int]:
        """Drafts of the sequence whose first row is this one."""
        drafts = self.batch.drafts
        assert drafts is not None
        found: list[int] = self.batch.token_ids[first + 1 : first + 1 + int(drafts[self.places[first]])].tolist()
        return found

    def tallies(self, first_place: int, vocabulary: int) -> tuple[Int64s, DraftCounts | None]:
        """Place of each row's counts: its slot, or for draft rows with penalties the next one from `first_place` on."""
        if not self.sampling.tallied:
            return self.slots, None
        places, rows = self.slots.copy(), list[int]()
        for row in np.flatnonzero(self.ahead).tolist():
            if self.sampling.states[self.places[row]].tally is not None:
                places[row] = first_place + len(rows)
                rows.append(row)
        if not rows:
            return places, None
        at = np.concatenate([self._flat(row, int(places[row]), vocabulary) for row in rows])
        unique, counts = np.unique(at, return_counts=True)
        return places, DraftCounts(places[rows], self.slots[rows], np.stack((unique, counts)))

    def _flat(self, row: int, place: int, vocabulary: int) -> Int64s:
        drafts = self.batch.token_ids[row - int(self.ahead[row]) + 1 : row + 1].astype(np.int64)
        found: Int64s = place * vocabulary + drafts
        return found

    def accept(self, tokens: Int64s, failures: dict[int, Failure], sampled: Sampled) -> Int64s:
        """Adds the accepted tokens of each sequence to `sampled`, and returns the row of each sequence's last token.
        `failures`: by row. A row that fails behind an accepted draft ends the run (verify.py)."""
        starts, guess, found, last = self.batch.spans.starts.tolist(), self.batch.token_ids.tolist(), tokens.tolist(), []
        for place, (first, end) in enumerate(pairwise(starts)):
            row = first
            if first in failures:
                sampled.failed[place] = failures[first]
            else:
                while row + 1 < end and guess[row + 1] == found[row] and row + 1 not in failures:
                    row += 1
            if row > first:
                sampled.accepted[place] = found[first:row]
            last.append(row)
        sampled.tokens[:] = tokens[last]
        return np.array(last, np.int64)

    def consume(self, sampled: Sampled) -> None:
        """Advances the states of sequences by their accepted drafts."""
        for place, tokens in sampled.accepted.items():
            state = self.sampling.states[place]
            for token in tokens:
                state.sampled(token)
            if state.grammar is not None:
                state.grammar.accept(tokens)
            if state.tally is not None:  # the sequence's own row has counted the first one
                self.sampling.columns.count(int(self.sampling.slots[place]), [*tokens[1:], int(sampled.tokens[place])])
