"""What attention is told about a step, and what a backend must offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.models.layers.attention import AttentionContext

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spans:
    """Whose rows the flat batch holds, and where their keys and values are.

    flat batch   |-- sequence 0 --|- 1 -|------- 2 -------|      starts = [0, 4, 5, 11]
    sequence 2   |---- contexts[2] tokens in the pool ----|-- its 6 rows of this step --|
    """

    tables: Int32s
    "[slots, width] block numbers. The slots' own arrays, not a copy: valid until the next plan."
    slots: Int64s
    "[sequences] which row of `tables` is theirs."
    starts: Int64s
    "[sequences + 1]"
    contexts: Int64s
    "[sequences]"

    @property
    def counts(self) -> Int64s:
        return np.diff(self.starts)


class AttentionBackend(Protocol):
    """Made once for a pool; asked once a step for what the model calls once a layer."""

    name: str

    def begin(self, spans: Spans) -> AttentionContext: ...
