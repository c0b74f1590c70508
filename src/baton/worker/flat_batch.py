"""The tokens of one step, sequence after sequence: what a forward pass is given.

flat batch   |-- sequence 0 --|- 1 -|------- 2 -------|      starts = [0, 4, 5, 11]
sequence 2   |---- contexts[2] tokens in the pool ----|-- its 6 rows of this step --|
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.worker.arrays import Bools, Int32s, Int64s

FEEDBACK = -1
"""In place of a token id: the token that this slot sampled in the step before, which the host does not know yet."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Whose rows the flat batch holds, and where their keys and values are."""

    tables: Int32s
    "[slots, width] block numbers. The slots' own arrays, not a copy: valid until the next plan."
    slots: Int64s
    "[sequences] which row of `tables` is theirs."
    starts: Int64s
    "[sequences + 1]"
    contexts: Int64s
    "[sequences]"


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Steps that run one token each of the same sequences may be told with the same object, and other numbers in its arrays."""

    spans: Spans
    token_ids: Int32s
    "[tokens], or FEEDBACK: never where steps_ahead is 1 (executors/base.py)."
    positions: Int64s
    "[tokens] each counted from the start of its sequence."
    due: Bools
    "[sequences] whose tokens are all computed after this step: they get a new one."

    @property
    def last_rows(self) -> Int64s:
        """[sequences] the row of each sequence's last token."""
        return self.spans.starts[1:] - 1

    @property
    def feedback_slots(self) -> Int64s:
        """[tokens] the slot whose last token a row runs, where its token id is FEEDBACK."""
        spans = self.spans
        return spans.slots if len(spans.slots) == len(self.token_ids) else np.repeat(spans.slots, np.diff(spans.starts))
