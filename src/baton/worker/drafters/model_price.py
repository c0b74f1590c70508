"""Decides which drafts of a draft model pay. Such drafts cost time before it is known whether they are right.

    tokens per second = (sequences + expected accepted drafts) / (seconds of the step, of waiting, and of the rounds that draft)

Work that may gain nothing is paid from an account: computing the tokens that the draft model lacks (a prompt, say), and drafts
that are compared but not run. The account receives 2 % of the time of all steps, and the time that drafts have saved. So a
draft model that never guesses right costs about 2 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Final

from baton.worker.drafters.passes import UNBOUNDED

FIRST_SHARE: Final = 0.6
"""Assumed share of right drafts of a model, until some are verified."""
LEARNING: Final = 0.2
OBSERVED_MAX: Final = 12
"""Number of drafts over which the weight of a draft in the share of its sequence falls from 1/5 to 1/17, as in price.py."""
OVERALL_MAX: Final = 64
"""Number of drafts over which the weight of a draft in the share of all sequences falls from 1/5 to 1/69. New sequences begin
there."""
SURE_DRAFTS: Final = 8
"""Number of verified drafts from which the share of all sequences is believed. Before, the tokens that the draft model lacks
are computed for one sequence only."""
GAIN_MIN: Final = 1.05
READY_ROWS: Final = 18
"""Maximum of missing rows of a ready sequence. Others are computed first, from the account. One step with the maximum of
accepted drafts leaves fewer."""
ALLOWANCE: Final = 0.02
"""Share of the time of steps that goes to the account."""
FIRST_STEPS: Final = 32
"""Balance at the start, in steps. Without it half of the first answer would be generated before the draft model has its
prompt."""
STEPS_MAX: Final = 64
"""Maximum of the balance, in steps, so that old gains do not pay for later losses."""
UNPAID_STEPS_MAX: Final = 4
"""Maximum of the balance, in steps, while drafts do not pay."""
INTERVAL_MAX: Final = 31
"""Maximum of steps in a row in which drafts are not tried."""
ROWS_MAX: Final = 256
"""Maximum of rows per step that the draft model computes in a first round."""


class PassSeconds:
    """Average seconds of the draft model's passes. Sizes are grouped by powers of two."""

    __slots__ = ("_points",)

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}
        "Average rows and seconds, by the bits of the number of rows."

    def measured(self, rows: int, seconds: float) -> None:
        before = self._points.get(rows.bit_length(), (float(rows), seconds))
        size, known = before
        self._points[rows.bit_length()] = size + (rows - size) * LEARNING, known + (seconds - known) * LEARNING

    def __call__(self, rows: int) -> float | None:
        """Expected seconds: on the line between two measured sizes; below the smallest as that, beyond the largest in
        proportion. None: nothing is measured."""
        points = [self._points[bits] for bits in sorted(self._points)]
        if not points:
            return None
        if rows <= points[0][0]:
            return points[0][1]
        for (low, low_seconds), (high, high_seconds) in pairwise(points):
            if rows <= high:
                return low_seconds + (high_seconds - low_seconds) * (rows - low) / (high - low)
        return points[-1][1] * rows / points[-1][0]


class ModelPrice:
    __slots__ = ("_balance", "_observed", "_overall", "_shares", "_step", "_verified", "passes", "waiting")

    def __init__(self, step_seconds: Callable[[int], float]) -> None:
        """`step_seconds`: expected time of a step of the main model, by its rows."""
        self._step = step_seconds
        self.passes = PassSeconds()
        self.waiting = 0.0
        "Extra seconds of a step with drafts, which waits for the tokens before it (price.py)."
        self._balance: float | None = None
        "Seconds in the account. None: no step is measured yet."
        self._shares: dict[int, float] = {}
        "Share of right drafts by slot, where one was verified."
        self._observed: dict[int, int] = {}
        self._overall, self._verified = FIRST_SHARE, 0
        "The share of right drafts of all sequences, and the number of verified drafts."

    def assign_slot(self, slot: int) -> None:
        self._shares.pop(slot, None)
        self._observed[slot] = 0

    # The account

    def stepped(self, seconds: float) -> None:
        """Record that the main model computed a step without prompts."""
        most = STEPS_MAX * seconds
        before = FIRST_STEPS * seconds if self._balance is None else self._balance
        self._balance = min(most, before + ALLOWANCE * seconds)

    def spent(self, seconds: float) -> None:
        if self._balance is not None:
            self._balance -= seconds

    def saved(self, sequences: int, rows: int, accepted: int) -> None:
        """Add the seconds that the drafts of a step saved. `rows`: its draft rows, of which `accepted` were right."""
        plain = self._step(sequences)
        self.spent(self._step(sequences + rows) - plain - plain / sequences * accepted)

    def found_nothing(self) -> None:
        """Lower the balance: drafts have not paid for a while."""
        if self._balance is not None:
            self._balance = min(self._balance, UNPAID_STEPS_MAX * self._step(1))

    @property
    def in_credit(self) -> bool:
        return self._balance is not None and self._balance > 0

    # Decisions

    @property
    def knows_share(self) -> bool:
        return self._verified >= SURE_DRAFTS

    def choose(
        self, sequences: int, rows: int, lacking: Mapping[int, int], most: Mapping[int, int], room: int = UNBOUNDED
    ) -> dict[int, int]:
        """Return the number of drafts by slot. `sequences`, `rows`: of the step. `lacking`: rows of round 1 of each ready slot;
        `most`: drafts that each has room for; `room`: maximum of all together."""
        if self.passes(1) is None:
            return {}
        likely = sorted(
            ((-(self._share(slot) ** place), place, slot) for slot in lacking for place in range(1, most[slot] + 1)),
        )[:room]
        in_round: dict[int, int] = {}
        tokens, drafting = float(sequences), 0.0
        best, highest = 0, GAIN_MIN * sequences / self._step(sequences)
        for number, (chance, place, slot) in enumerate(likely, 1):
            before = in_round.get(place, 0)
            in_round[place] = before + (lacking[slot] if place == 1 else 1)
            drafting += self._pass(in_round[place]) - (self._pass(before) if before else 0.0)
            tokens -= chance
            rate = tokens / (self._step(rows + number) + self.waiting + drafting)
            if rate > highest:
                best, highest = number, rate
        chosen: dict[int, int] = {}
        for _, _, slot in likely[:best]:
            chosen[slot] = chosen.get(slot, 0) + 1
        return chosen

    def catch_up_rows(self, sequences: int) -> int:
        """Number of rows that the draft model may compute for sequences that are not ready: they delay the step by about
        its own time. 0: the account is empty."""
        if not self.in_credit:
            return 0
        rows, bound = 16, self._step(sequences)
        while 2 * rows <= ROWS_MAX and self._pass(2 * rows) <= bound:
            rows *= 2
        return rows

    def _pass(self, rows: int) -> float:
        return self.passes(rows) or 0.0

    # Value of drafts

    def accepted(self, slot: int, drafted: int, accepted: int) -> None:
        """Learn from the verified drafts of a slot: the first `accepted` of `drafted` were right."""
        for place in range(min(drafted, accepted + 1)):
            right = place < accepted
            share = self._share(slot)
            self._shares[slot] = share + (right - share) / (5 + min(self._observed[slot], OBSERVED_MAX))
            self._overall += (right - self._overall) / (5 + min(self._verified, OVERALL_MAX))
            self._observed[slot] += 1
            self._verified += 1

    def _share(self, slot: int) -> float:
        """Expected share of right drafts of a slot: that of all sequences, until one of its own was verified."""
        return self._shares.get(slot, self._overall)
