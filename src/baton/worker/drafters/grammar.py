"""Drafts from structured output: the text that is expected next, such as the name of a property and the white space around it.

The model's own tokens of that text may be others: a draft is verified like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.worker.arrays import Int32s
from baton.worker.drafters.base import JoinedDraft
from baton.worker.grammar_masks import GrammarState


class GrammarDrafter:
    def __init__(self) -> None:
        self._grammars: dict[int, GrammarState | None] = {}

    def assign_slot(self, slot: int, grammar: GrammarState | None = None) -> None:
        self._grammars[slot] = grammar

    def propose(self, slot: int, tokens: Int32s, most: int) -> Sequence[int]:
        grammar = self._grammars[slot]
        if grammar is None:
            return ()
        draft = grammar.draft(most)
        return JoinedDraft(draft, expected=len(draft))

    def accepted(self, slot: int, drafted: int, accepted: int) -> None:
        """Nothing to do: the grammar consumes sampled tokens itself."""

    def drop(self, slot: int) -> None:
        del self._grammars[slot]
