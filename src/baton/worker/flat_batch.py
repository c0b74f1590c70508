"""The tokens of one step, sequence after sequence: the input of a forward pass.

flat batch   |-- sequence 0 --|- 1 -|------- 2 -------|      starts = [0, 4, 5, 11]
sequence 2   |---- contexts[2] tokens in the pool ----|-- its 6 rows of this step --|
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.worker.arrays import Bools, Int32s, Int64s

FEEDBACK = -1
"""In place of a token id: the token that this slot sampled in the previous step, which the host does not have yet."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Sequences of the rows in the flat batch, and the places of their keys and values."""

    tables: Int32s
    "[slots, width] block numbers. The slots' own arrays, not a copy: valid until the next plan."
    slots: Int64s
    "[sequences] row of `tables`."
    starts: Int64s
    "[sequences + 1]"
    contexts: Int64s
    "[sequences]"


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """One step. Decode steps of the same sequences may reuse the object, with other numbers in its arrays."""

    spans: Spans
    token_ids: Int32s
    "[tokens], or FEEDBACK: never with steps_ahead 1 (executors/base.py)."
    positions: Int64s
    "[tokens] each counted from the start of its sequence."
    due: Bools
    "[sequences] whether all tokens are computed after this step: such a sequence gets a new one."

    @property
    def last_rows(self) -> Int64s:
        """[sequences] row of each sequence's last token."""
        return self.spans.starts[1:] - 1

    @property
    def feedback_slots(self) -> Int64s:
        """[tokens] the slot whose last token a row runs, if its token id is FEEDBACK."""
        spans = self.spans
        return spans.slots if len(spans.slots) == len(self.token_ids) else np.repeat(spans.slots, np.diff(spans.starts))
