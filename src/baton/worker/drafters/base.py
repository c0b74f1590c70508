"""The interface of drafters: they guess the next tokens of a sequence, and a step verifies the guess (speculative decoding).

    propose     t | d1 d2 d3        the step runs the last token t and the drafts behind it
    sample      s1 | s2 s3 s4       each position as without drafts: s2 counts if s1 = d1, s3 if also s2 = d2
    accepted    s1 s2               the first that differs from its draft is the model's own token, and the last

So a draft never changes a token, only the number of steps: a drafter may guess anything, and need not be deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from baton.worker.arrays import Int32s
from baton.worker.grammar_masks import GrammarState


class JoinedDraft(list[int]):
    """Draft tokens, of which the first are expected text (grammar/expected_text.py): mostly right, unlike those that follow."""

    def __init__(self, tokens: Iterable[int], expected: int) -> None:
        """`expected`: number of tokens of expected text."""
        super().__init__(tokens)
        self.expected = expected


def expected_of(draft: Sequence[int]) -> int:
    """Number of tokens of a draft that are expected text."""
    return draft.expected if isinstance(draft, JoinedDraft) else 0


class Drafter(Protocol):
    """All calls come from the worker's thread. A slot is assigned before it is used. It may be assigned again without a drop:
    the runner was cleared."""

    def assign_slot(self, slot: int, grammar: GrammarState | None = None) -> None:
        """Begin a new sequence in the slot. `grammar`: of its structured output."""
        ...

    def propose(self, slot: int, tokens: Int32s, most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow `tokens`, prompt and output of the sequence; valid during the call."""
        ...

    def accepted(self, slot: int, drafted: int, accepted: int) -> None:
        """The last proposal had `drafted` tokens, of which the first `accepted` were right."""
        ...

    def drop(self, slot: int) -> None:
        """The sequence has left the slot."""
        ...
