"""Drafts from the sequence itself: what followed its last tokens when they occurred before, in the prompt or the output.

    tokens   ... the quick brown fox ... the quick brown
                               |---- draft            |--- last 4 tokens, else 3, else 2

The most recent occurrence counts. An index of all suffixes grows with the sequence: constant time per token. It is built when
the first draft is wanted, so sequences that never draft pay nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from baton.worker.arrays import Int32s
from baton.worker.grammar_masks import GrammarState

SUFFIXES: Final = (4, 3, 2)
"""Lengths of the suffixes that are looked up, the longest first."""
TOKENS_MAX: Final = 1 << 18
"""Tokens in the indices of all sequences, of 360 bytes each. A sequence that would exceed it gets no drafts."""
FEW: Final = 8
"""Maximum of new tokens whose suffixes are hashed one by one."""
FACTOR: Final = 0x9E3779B97F4A7C15
MASK: Final = (1 << 64) - 1


class Index:
    """Ends of the suffixes of one sequence."""

    __slots__ = ("after", "read")

    def __init__(self) -> None:
        self.after: dict[int, int] = {}
        "Position behind the suffix, by its hash. Hashes may collide: a wrong draft costs time and nothing else."
        self.read = 0
        "Suffixes that end before this position are in the index."

    def extend(self, tokens: Int32s) -> None:
        """Add all suffixes that a token follows."""
        begin, end = self.read, len(tokens) - 1
        if end - begin <= FEW:
            first = max(0, begin - SUFFIXES[0] + 1)
            known: list[int] = tokens[first:end].tolist()
            for place in range(begin - first, end - first):
                for value in _suffixes(known[max(0, place - SUFFIXES[0] + 1) : place + 1]):
                    self.after[value] = first + place + 1
        else:
            for length in SUFFIXES:
                first = max(begin, length - 1)
                self.after.update(zip(_hashes(tokens, first, end, length), range(first + 1, end + 1), strict=True))
        self.read = max(begin, end)

    def find(self, tokens: Int32s) -> int | None:
        """Position behind the last earlier occurrence of the longest suffix."""
        for value in reversed(_suffixes(tokens[-SUFFIXES[0] :].tolist())):
            if (found := self.after.get(value)) is not None:
                return found
        return None


class NgramDrafter:
    def __init__(self) -> None:
        self._indices: dict[int, Index] = {}
        self._indexed = 0
        "Tokens in all indices."

    def assign_slot(self, slot: int, grammar: GrammarState | None = None) -> None:
        if slot in self._indices:
            self.drop(slot)
        self._indices[slot] = Index()

    def propose(self, slot: int, tokens: Int32s, most: int) -> Sequence[int]:
        index = self._indices[slot]
        more = max(0, len(tokens) - 1 - index.read)
        if self._indexed + more > TOKENS_MAX:
            return ()
        index.extend(tokens)
        self._indexed += more
        begin = index.find(tokens)
        if begin is None:
            return ()
        draft: list[int] = tokens[begin : begin + most].tolist()
        while len(draft) < most:  # the sequence repeats itself, and so does the draft
            draft.append(draft[len(draft) + begin - len(tokens)])
        return draft

    def behind(self, slot: int, tokens: Int32s, drafts: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that followed the last tokens of these drafts. Called after `propose` with the same tokens."""
        index = self._indices[slot]
        if most <= 0 or index.read < len(tokens) - 1:
            return []
        begin = index.find(np.append(tokens[-SUFFIXES[0] :], np.array(drafts, np.int32)))
        found: list[int] = [] if begin is None else tokens[begin : begin + most].tolist()
        return found

    def accepted(self, slot: int, drafted: int, accepted: int) -> None:
        """Nothing to do: the index reads the tokens themselves."""

    def drop(self, slot: int) -> None:
        self._indexed -= self._indices.pop(slot).read


def _suffixes(last: Sequence[int]) -> list[int]:
    """Hashes of the suffixes of some tokens, the shortest first: each extends the one before it to the left."""
    value, values = 0, []
    for token in reversed(last):
        value = (value * FACTOR + token + 1) & MASK
        values.append(value)
    return values[SUFFIXES[-1] - 1 :]


def _hashes(tokens: Int32s, begin: int, end: int, length: int) -> list[int]:
    """Hashes of the suffixes of this length that end at positions `begin` to `end`, without the last."""
    values = np.zeros(max(0, end - begin), np.uint64)
    wide = tokens.astype(np.uint64) + np.uint64(1)
    for place in range(length):
        first = begin - place
        values = values * np.uint64(FACTOR) + wide[first : first + len(values)]
    found: list[int] = values.tolist()
    return found
