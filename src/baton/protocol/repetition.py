"""The rule by which an answer that repeats itself ends."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

PATTERN_TOKENS_MAX: Final = 256
"""Tokens of the longest pattern that a request may ask for: the engine compares every length up to it."""
COUNT_MAX: Final = 2**31 - 1


class RepetitionStop(Struct, frozen=True, kw_only=True, array_like=True):
    """The rule for repetitions: an answer ends when its last tokens are one pattern, repeated.

    The pattern has pattern_min to pattern_max tokens. Its repetitions follow each other without a gap. There are at least
    `count_min` of them, and they cover at least `tokens_min` tokens; the last repetition that `tokens_min` requires may be
    incomplete. The prompt does not count. So the position of the end follows from the output token ids alone.
    """

    pattern_max: Annotated[int, Meta(ge=1, le=PATTERN_TOKENS_MAX)] = 128
    pattern_min: Annotated[int, Meta(ge=1, le=PATTERN_TOKENS_MAX)] = 1
    count_min: Annotated[int, Meta(ge=2, le=COUNT_MAX)] = 3
    tokens_min: Annotated[int, Meta(ge=0, le=COUNT_MAX)] = 128

    def __post_init__(self) -> None:
        if self.pattern_min > self.pattern_max:
            raise ValueError(f"pattern_min is {self.pattern_min}, which is more than pattern_max ({self.pattern_max})")


STOP_ON_REPETITION: Final = RepetitionStop()
"""Meaning of `stop_on_repetition`: a passage of up to 128 tokens three times in a row, and at least 128 tokens. Tables and
rulers repeat fewer tokens than that."""
