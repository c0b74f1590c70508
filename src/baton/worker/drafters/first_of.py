"""Several drafters: the first that has a proposal for a sequence drafts."""

from __future__ import annotations

from collections.abc import Sequence

from baton.worker.arrays import Int32s
from baton.worker.drafters.base import Drafter
from baton.worker.grammar_masks import GrammarState


class FirstOf:
    def __init__(self, *drafters: Drafter) -> None:
        self._drafters = drafters

    def assign_slot(self, slot: int, grammar: GrammarState | None = None) -> None:
        for each in self._drafters:
            each.assign_slot(slot, grammar)

    def propose(self, slot: int, tokens: Int32s, most: int) -> Sequence[int]:
        return next((draft for each in self._drafters if (draft := each.propose(slot, tokens, most))), ())

    def accepted(self, slot: int, drafted: int, accepted: int) -> None:
        for each in self._drafters:
            each.accepted(slot, drafted, accepted)

    def drop(self, slot: int) -> None:
        for each in self._drafters:
            each.drop(slot)
