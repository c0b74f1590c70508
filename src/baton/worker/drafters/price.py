"""Chooses how many drafts run, so that a step gives the most tokens per second. The price is the measured time of a step by its
rows; the gain is the share of right drafts of each sequence, measured for expected text and for other drafts.

    tokens a second = (sequences + expected accepted drafts) / (seconds(rows) + seconds of waiting)

If a draft is right with probability p, the j-th draft of a sequence is accepted with probability p^j; behind drafts of expected
text, those of other drafts follow. The likeliest drafts of
all sequences are added one by one, and the number with the most tokens per second runs; no draft runs unless that is clearly
more than without drafts. A draft that was not run is measured too, without cost: the next token shows whether it was right. The
choice changes no token, so decisions by the clock are harmless here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from baton.worker.arrays import Int32s
from baton.worker.drafters.step_times import StepTimes
from baton.worker.grammar_masks import GrammarState

LEARNING: Final = 0.2
"""Weight of a new measurement of a wait."""
OBSERVED_MAX: Final = 12
"""The weight of a draft in the share of its sequence falls from 1/5 to 1/17 over this many drafts. With a constant 1/5 the
share would vary so much that drafts that pay would often not run."""
FIRST_SHARE: Final = 0.2
"""Assumed share of right drafts of a new sequence: too small to run a draft until one would have been right."""
FIRST_SHARE_EXPECTED: Final = 0.9
"""Assumed share of right drafts of a new sequence, for expected text."""
GAIN_MIN: Final = 1.05
"""Ratio of expected tokens per second, with drafts against without, from which drafts run."""
ROWS_MAX: Final = 64
"""Maximum of drafts per step. With more sequences than this a step is bound by arithmetic, and drafts do not pay."""
HOPELESS: Final = 0.1
"""Share of right drafts below which those of a sequence are not promising."""
ASK_INTERVALS: Final = (1, 1, 1, 1, 2, 2, 4, 4, 8)
"""Steps from one question for drafts to the next, by the number of questions in a row without a promising draft."""

WAIT_INTERVAL_MAX: Final = 15
"""Maximum of steps in a row that do not wait for drafts."""


class DraftPrice:
    __slots__ = (
        *(
            "_expected",
            "_guesses",
            "_interval",
            "_observed",
            "_pause",
            "_quiet",
            "_shares",
            "_steps",
            "_times",
        ),
        *("_waited", "_waiting", "_waits"),
    )

    def __init__(self, row_cost: float = 0.2, *, waits: bool = False) -> None:
        """`row_cost`: assumed cost of one more row, as a share of a step with one row, until steps with more rows are measured.
        `waits`: a device computes. A step with drafts waits for the tokens of the previous step, and the device is idle
        then."""
        self._times = StepTimes(row_cost)
        self._waits = waits
        self._waiting = None if waits else 0.0
        "Extra seconds of a step that waits for the previous tokens. None: not measured; no drafts run until it is."
        self._steps = 0
        "Steps that asked for drafts."
        self._quiet: dict[int, int] = {}
        "Questions in a row without a promising draft, by slot. Not for slots with a grammar, which are always asked."
        self._shares: dict[tuple[int, bool], float] = {}
        "Share of right drafts, by slot and by whether the draft was expected text."
        self._observed: dict[tuple[int, bool], int] = {}
        "Number of drafts in each of `_shares`."
        self._expected: dict[int, int] = {}
        "Number of tokens of expected text at the beginning of a slot's last proposal."
        self._guesses: dict[int, tuple[int, int, bool]] = {}
        "The draft of each slot that was not run: its position, its first token, and whether it was expected text."
        self._interval = self._pause = 0
        "Number of steps that will not wait after a step that waited without a draft; and how many of them are left."
        self._waited: tuple[int, bool] = -1, False
        "The step of the last call of `worth_waiting`, and the answer."

    def assign_slot(self, slot: int, grammar: GrammarState | None = None) -> None:
        self._expected[slot] = 0
        self._quiet.pop(slot, None)
        if grammar is None:
            self._quiet[slot] = 0
        for expected, share in ((False, FIRST_SHARE), (True, FIRST_SHARE_EXPECTED)):
            self._shares[slot, expected], self._observed[slot, expected] = share, 0
        self._guesses.pop(slot, None)

    def drop(self, slot: int) -> None:
        del self._expected[slot]
        self._quiet.pop(slot, None)
        for expected in (False, True):
            del self._shares[slot, expected], self._observed[slot, expected]
        self._guesses.pop(slot, None)

    def worth_asking(self, slot: int) -> bool:
        """Whether to ask for drafts of the slot in this step. The longer none was promising, the fewer steps ask: a question
        costs time too. Where steps wait for drafts, those that wait are few, and ask for all."""
        quiet = self._quiet.get(slot, 0)
        return self._waits or self._steps % ASK_INTERVALS[min(quiet, len(ASK_INTERVALS) - 1)] == 0

    def asked(self, slot: int, *, found: bool) -> None:
        """Record the answer for the slot. `found`: there is a draft, and `proposed` knows it."""
        if slot in self._quiet:
            promising = found and self._shares[slot, self._expected[slot] > 0] >= HOPELESS
            self._quiet[slot] = 0 if promising else self._quiet[slot] + 1

    def worth_waiting(self, step: int) -> bool:
        """Whether this step waits for the previous tokens, so that drafts can follow them. The longer no draft has run, the
        fewer steps wait, because the device is idle meanwhile. All calls for one step return the same."""
        if self._waited[0] != step:
            self._waited = step, self._pause == 0
            self._pause = max(0, self._pause - 1)
        return self._waited[1]

    def has_waited(self, step: int) -> bool:
        """Whether `worth_waiting` returned True for this step."""
        return self._waited == (step, True)

    @property
    def waiting(self) -> float | None:
        """Extra seconds of a step that waits for the previous tokens. None: not measured; no drafts run until it is."""
        return self._waiting

    @property
    def is_measured(self) -> bool:
        """Whether the time of any step is known."""
        return bool(self._times)

    def tried(self, *, found: bool) -> None:
        """Record that a step asked for drafts. `found`: some of them run, or a draft model needs the next step's tokens too.
        Otherwise the pause until the next try doubles."""
        self._steps += 1
        self._interval = 0 if found else min(WAIT_INTERVAL_MAX, 2 * self._interval + 1)
        self._pause = self._interval

    def waited_for_nothing(self, rows: int, seconds: float) -> None:
        """Learn the cost of waiting from a step that waited and had neither prompts nor drafts. `seconds`: from the
        previous step's tokens to its own."""
        if rows in self._times:
            longer = max(0.0, seconds - self._times.seconds(rows))
            self._waiting = longer if self._waiting is None else self._waiting + (longer - self._waiting) * LEARNING

    def measured(self, rows: int, seconds: float, *, waited: bool = False) -> None:
        """Learn the time of a step without prompts. `waited`: `seconds` counts from the previous step's tokens."""
        if waited:
            seconds = max(seconds - (self._waiting or 0.0), 0.5 * seconds)
        self._times.measured(rows, seconds)

    def proposed(self, slot: int, *, expected: int) -> None:
        """Record a new proposal of the slot. `expected`: number of tokens at its beginning that are expected text."""
        self._expected[slot] = expected

    def accepted(self, slot: int, drafted: int, accepted: int) -> None:
        """Learn from the last proposal of the slot: `accepted` of its `drafted` tokens were right."""
        expected = min(self._expected[slot], drafted)
        self._learn((slot, True), expected, accepted)
        if accepted >= expected:
            self._learn((slot, False), drafted - expected, accepted - expected)

    def _learn(self, source: tuple[int, bool], drafted: int, accepted: int) -> None:
        share, observed = self._shares[source], self._observed[source]
        for place in range(min(drafted, accepted + 1)):
            share += ((place < accepted) - share) / (5 + min(observed, OBSERVED_MAX))
            observed += 1
        self._shares[source], self._observed[source] = share, observed

    def not_run(self, slot: int, position: int, token: int) -> None:
        """Remember the first token of a draft that was not run; `known` compares it with the sampled token."""
        self._guesses[slot] = position, token, self._expected[slot] > 0

    def known(self, slot: int, tokens: Int32s) -> None:
        """Learn whether the draft that was not run was right. `tokens`: all tokens of the sequence so far."""
        position, token, expected = self._guesses.pop(slot, (len(tokens), 0, False))
        if position < len(tokens):
            self._learn((slot, expected), 1, int(tokens[position] == token))

    def choose(self, sequences: int, drafts: Mapping[int, int], *, waits: bool = True) -> dict[int, int]:
        """Return how many of the proposed drafts to run, by slot. `sequences`: in the step. `drafts`: proposed tokens by slot.
        `waits`: the step waits for the previous tokens only because of drafts, so the wait counts as their cost."""
        waiting = self._waiting if waits else 0.0
        if waiting is None:
            return {}
        likely = sorted(
            ((chance, slot) for slot, count in drafts.items() for chance in self._chances(slot, count)),
            key=lambda pair: -pair[0],
        )[:ROWS_MAX]
        without = self.seconds(sequences)
        best, most, tokens = 0, GAIN_MIN * sequences / without, float(sequences)
        for number, (chance, _) in enumerate(likely, 1):
            tokens += chance
            longer = max(without, self.seconds(sequences + number))  # further rows save no time: a shorter one is chance
            rate = tokens / (longer + waiting)
            if rate > most:
                best, most = number, rate
        chosen: dict[int, int] = {}
        for _, slot in likely[:best]:
            chosen[slot] = chosen.get(slot, 0) + 1
        return chosen

    def _chances(self, slot: int, count: int) -> list[float]:
        """Probabilities that the drafts of the slot's last proposal are accepted."""
        chance, chances = 1.0, list[float]()
        for place in range(count):
            chance *= self._shares[slot, place < self._expected[slot]]
            chances.append(chance)
        return chances

    def seconds(self, rows: int) -> float:
        """Expected seconds of a step with this many rows."""
        return self._times.seconds(rows)
