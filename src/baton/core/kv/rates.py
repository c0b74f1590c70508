"""Measured cost of moving a block: a running quantile, so that one slow move does not count as the rule."""

from __future__ import annotations

from typing import Final

QUANTILE: Final = 0.75
STEP: Final = 0.2


class BlockRate:
    """Seconds per block of one direction between tiers. The rate rises much when a move was slower, and falls a little when it
    was not."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds: float | None = None

    def moved(self, blocks: int, seconds: float) -> None:
        if blocks < 1 or seconds <= 0.0:
            return
        sample = seconds / blocks
        if self.seconds is None:
            self.seconds = sample
        elif sample > self.seconds:
            self.seconds = min(sample, self.seconds * (1.0 + STEP * QUANTILE / (1.0 - QUANTILE)))
        else:
            self.seconds = max(sample, self.seconds * (1.0 - STEP))
