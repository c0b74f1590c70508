"""The tokens of one step, sequence after sequence: the input of a forward pass.

flat batch   |-- sequence 0 --|- 1 -|------- 2 -------|      starts = [0, 4, 5, 11]
sequence 2   |---- contexts[2] tokens in the pool ----|-- its 6 rows of this step --|
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.worker.arrays import Bools, Int32s, Int64s

FEEDBACK = -1
"""Stands for the token that this slot sampled in the previous step: the host does not have it yet."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Sequences of the rows in the flat batch, and the places of their keys and values."""

    tables: Int32s
    "[slots, width] block numbers, not copied: valid until the next plan."
    slots: Int64s
    "[sequences] row of `tables`."
    starts: Int64s
    "[sequences + 1] first row of each sequence."
    contexts: Int64s
    "[sequences] tokens in the pool before this step."


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """The rows of a step with drafts, by sequence. Steps of the same sequences with as many drafts share the object."""

    drafts: Int64s
    "[sequences] rows of draft tokens behind the sequence's own."
    starts: Int64s
    "[sequences + 1] first row of each sequence."
    places: Int64s
    "[rows] batch index of the row's sequence."
    behind: Int64s
    "[rows] rows of the same sequence before it."
    slots: Int64s
    "[rows] slot of the row's sequence."
    bounds: Int64s
    "[rows + 1] first row of each row, and the number of rows: for devices to which a row is a sequence."
    due: Bools
    "[rows] True: a token is sampled for each."

    @classmethod
    def of(cls, slots: Int64s, counts: Int64s, drafts: Int64s) -> DraftLayout:
        """`counts`: rows of each sequence without drafts."""
        rows = counts + drafts
        starts: Int64s = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(rows, out=starts[1:])
        places = np.repeat(np.arange(len(slots)), rows)
        bounds = np.arange(len(places) + 1)
        return cls(drafts, starts, places, bounds[:-1] - starts[places], slots[places], bounds, np.ones(len(places), np.bool_))


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """One step. Decode steps of the same sequences may reuse the object, with other numbers in its arrays."""

    spans: Spans
    token_ids: Int32s
    "[tokens] token ids, or FEEDBACK: never with steps_ahead 1 (executors/base.py)."
    positions: Int64s
    "[tokens] positions, each counted from the start of its sequence."
    due: Bools
    "[sequences] whether all tokens are computed after this step: such a sequence gets a new one."
    drafted: DraftLayout | None = None
    "None: no sequence has drafts."

    @property
    def drafts(self) -> Int64s | None:
        """[sequences] rows of draft tokens behind the sequence's own. None: no sequence has drafts."""
        return None if self.drafted is None else self.drafted.drafts

    @property
    def last_rows(self) -> Int64s:
        """[sequences] row of each sequence's last token, drafts left out."""
        last = self.spans.starts[1:] - 1
        return last if self.drafts is None else last - self.drafts

    def without_drafts(self) -> FlatBatch:
        """The step without the drafts."""
        assert self.drafts is not None
        spans = self.spans
        own = np.ones(len(self.token_ids), np.bool_)
        for last, drafts in zip(self.last_rows.tolist(), self.drafts.tolist(), strict=True):
            own[last + 1 : last + 1 + drafts] = False
        starts = spans.starts.copy()
        starts[1:] -= np.cumsum(self.drafts)
        spans = Spans(spans.tables, spans.slots, starts, spans.contexts)
        return FlatBatch(spans, self.token_ids[own], self.positions[own], self.due)

    @property
    def feedback_slots(self) -> Int64s:
        """[tokens] the slot whose last token a row runs, if its token id is FEEDBACK."""
        spans = self.spans
        return spans.slots if len(spans.slots) == len(self.token_ids) else np.repeat(spans.slots, np.diff(spans.starts))
