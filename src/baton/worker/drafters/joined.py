"""Drafts from structured output and from the sequence itself, together.

expected text    \\n  "name": "        from the grammar; in the tokens that the sequence had for this text before, if it had
behind it        Ada",                 what followed the same tokens before: values that repeat
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.worker.arrays import Int32s
from baton.worker.drafters.base import JoinedDraft
from baton.worker.drafters.ngram import NgramDrafter
from baton.worker.grammar_masks import GrammarState


class JoinedDrafter:
    def __init__(self) -> None:
        self._ngram = NgramDrafter()
        self._grammars: dict[int, GrammarState | None] = {}

    def assign_slot(self, slot: int, grammar: GrammarState | None = None) -> None:
        self._ngram.assign_slot(slot)
        self._grammars[slot] = grammar

    def propose(self, slot: int, tokens: Int32s, most: int) -> Sequence[int]:
        grammar, own = self._grammars[slot], self._ngram.propose(slot, tokens, most)
        if grammar is None:
            return own
        expected = grammar.draft(most, own)
        if not expected or list(own[: len(expected)]) == expected:
            return JoinedDraft(own, expected=len(expected))
        behind = self._ngram.behind(slot, tokens, expected, most - len(expected))
        return JoinedDraft([*expected, *behind], expected=len(expected))

    def accepted(self, slot: int, drafted: int, accepted: int) -> None:
        """Nothing to do: the index reads the tokens, and the grammar consumes them."""

    def drop(self, slot: int) -> None:
        self._ngram.drop(slot)
        del self._grammars[slot]
