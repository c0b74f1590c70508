"""How many drafts pay: the measured time of a step by its rows, against the share of drafts that each sequence accepts.

    tokens a second = (sequences + expected accepted drafts) / seconds(rows)

A draft that is right with probability p, behind j - 1 others of its sequence, is accepted with p^j. The likeliest drafts of all
sequences are added one by one, and the number with the most tokens a second is run: none, unless that is clearly more than
without drafts. A draft that was not run teaches too, and for nothing: the next token shows whether it was right. Which drafts
run changes no token, so decisions by the clock are harmless here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Final

from baton.worker.arrays import Int32s
from baton.worker.grammar_masks import GrammarState

LEARNING: Final = 0.2
"""Weight of a new measurement."""
FIRST_SHARE: Final = 0.2
"""Assumed share of right drafts of a sequence without any: too few to run one, until one would have been right."""
GAIN_MIN: Final = 1.05
"""Drafts run if they are expected to give this many times the tokens per second of a step without."""
FIRST_ROW_COST: Final = 0.2
"""Assumed cost of one more row, as a share of a step with one row, until steps with more rows are measured."""
ROWS_MAX: Final = 64
"""Maximum of drafts per step. With more sequences than this a step is bound by arithmetic, and drafts do not pay."""
FORGET_STEPS: Final = 128
"""Times of sizes that were not measured in this many steps are forgotten: one slow moment must not exclude a size for ever."""


class DraftPrice:
    __slots__ = ("_guesses", "_recent", "_seconds", "_shares", "_sizes", "_steps")

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        "Average seconds of a step without prompts, by its rows."
        self._sizes: list[int] = []
        "Keys of `_seconds`, sorted."
        self._steps = 0
        self._recent: set[int] = set()
        "Sizes that were measured since others were last forgotten."
        self._shares: dict[int, float] = {}
        "Share of right drafts by slot."
        self._guesses: dict[int, tuple[int, int]] = {}
        "Position and first token of a draft that was not run, by slot."

    def seat(self, slot: int, grammar: GrammarState | None = None) -> None:
        self._shares[slot] = FIRST_SHARE
        self._guesses.pop(slot, None)

    def drop(self, slot: int) -> None:
        del self._shares[slot]
        self._guesses.pop(slot, None)

    def measured(self, rows: int, seconds: float) -> None:
        """A step without prompts took this long."""
        self._steps += 1
        if self._steps % FORGET_STEPS == 0:
            self._sizes = sorted(self._recent)
            self._seconds = {size: self._seconds[size] for size in self._sizes}
            self._recent.clear()
        self._recent.add(rows)
        known = self._seconds.get(rows)
        if known is None:
            insort(self._sizes, rows)
            self._seconds[rows] = seconds
        else:
            self._seconds[rows] = known + (seconds - known) * LEARNING

    def accepted(self, slot: int, drafted: int, accepted: int) -> None:
        share = self._shares[slot]
        for place in range(min(drafted, accepted + 1)):
            share += ((place < accepted) - share) * LEARNING
        self._shares[slot] = share

    def not_run(self, slot: int, position: int, token: int) -> None:
        """The draft for this position, which was not run, began with this token."""
        self._guesses[slot] = position, token

    def known(self, slot: int, tokens: Int32s) -> None:
        """The tokens of the sequence so far: they show whether a draft that was not run was right."""
        position, token = self._guesses.pop(slot, (len(tokens), 0))
        if position < len(tokens):
            self.accepted(slot, 1, int(tokens[position] == token))

    def choose(self, sequences: int, drafts: Mapping[int, int]) -> dict[int, int]:
        """Number of drafts to run by slot, of those that are proposed in a step of this many sequences."""
        likely = sorted(
            ((self._shares[slot] ** place, slot) for slot, count in drafts.items() for place in range(1, count + 1)),
            key=lambda pair: -pair[0],
        )[:ROWS_MAX]
        best, most, tokens = 0, GAIN_MIN * sequences / self.seconds(sequences), float(sequences)
        for number, (chance, _) in enumerate(likely, 1):
            tokens += chance
            rate = tokens / self.seconds(sequences + number)
            if rate > most:
                best, most = number, rate
        chosen: dict[int, int] = {}
        for _, slot in likely[:best]:
            chosen[slot] = chosen.get(slot, 0) + 1
        return chosen

    def seconds(self, rows: int) -> float:
        """Expected time of a step: measured, on the line between two measured sizes, or beyond them by the last line."""
        if (known := self._seconds.get(rows)) is not None:
            return known
        sizes = self._sizes
        if not sizes:
            return 1.0 + FIRST_ROW_COST * (rows - 1)
        at = bisect_left(sizes, rows)
        if len(sizes) == 1:
            base = self._seconds[sizes[0]] / (1.0 + FIRST_ROW_COST * (sizes[0] - 1))
            return base * (1.0 + FIRST_ROW_COST * (rows - 1))
        low, high = (
            (sizes[0], sizes[1]) if at == 0 else (sizes[at - 1], sizes[at]) if at < len(sizes) else (sizes[-2], sizes[-1])
        )
        slope = (self._seconds[high] - self._seconds[low]) / (high - low)
        return max(self._seconds[low] + slope * (rows - low), 0.5 * min(self._seconds.values()))
