"""Ends reasoning that has used up its budget, by allowing only the closing token.

BEFORE   the answer may begin with the opening token; not after a few other tokens
OPEN     tokens are counted; at the budget only the closing token is allowed
OVER     for the rest of the answer
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baton.protocol.thinking import Thinking

TOKENS_BEFORE_MAX: Final = 4
"""Maximum of tokens before the closing token; most are white space."""


class Thought:
    """State of one sequence: a function of its outputs, which only grow; each is read once."""

    __slots__ = ("_read", "_rules", "_state", "_used")

    def __init__(self, rules: Thinking) -> None:
        self._rules = rules
        self._state = "open" if rules.is_open else "before" if rules.start is not None else "over"
        self._used = 0
        self._read = 0

    def forced(self, outputs: NDArray[np.int32] | Sequence[int]) -> int | None:
        """The only allowed next token, if there is only one."""
        if self._state != "over":
            for token in outputs[self._read :]:
                self._advance(int(token))
        budget = self._rules.budget
        return self._rules.end if budget is not None and self._state == "open" and self._used >= budget else None

    def forced_behind(self, outputs: NDArray[np.int32] | Sequence[int]) -> int | None:
        """The only allowed next token, as of forced(), after outputs that end with drafts: they are not read for good."""
        return copy(self).forced(outputs)

    def _advance(self, token: int) -> None:
        self._read += 1
        if self._state == "before":
            if token == self._rules.start:
                self._state = "open"
            elif self._read >= TOKENS_BEFORE_MAX:
                self._state = "over"
        elif self._state == "open":
            self._used += 1
            if token == self._rules.end:
                self._state = "over"
