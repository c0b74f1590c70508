"""Sizes of the chunks in which a prompt is computed for another instance.

That instance copies a chunk while the next one is computed, so what is left to copy after the last one delays the second token:

    computing   |-- 1 --|-- 2 --|  ...  |-- 8 --|
    copying             |- 1 -| |- 2 -| ...     |- 8 -|  second token

An eighth of the prompt leaves an eighth of the copy. Small steps may be slower per token, by a fixed cost of each: prices are
learned per size of step, and a size that costs over COST_MAX more than larger ones is doubled. Sizes that were not measured yet
are tried, and the smallest again from time to time.
"""

from __future__ import annotations

from typing import Final

PARTS: Final = 8
COST_MAX: Final = 0.03
"""Factor by which a chunk may take longer per token than larger ones."""
LEARNING: Final = 0.125
AGAIN: Final = 32
"""Number of prompts of which one gets the smallest chunks, to measure them again."""


class HandoffChunks:
    __slots__ = ("_least", "_prices", "_prompts")

    def __init__(self, least: int) -> None:
        """`least`: smallest chunk, in tokens."""
        self._least = least
        self._prices: dict[int, float] = {}
        "Seconds per token of steps without decodes, by the number of bits of their tokens."
        self._prompts = 0

    def step_done(self, tokens: int, seconds: float) -> None:
        """Measure a step that computed prompts only."""
        bits, price = tokens.bit_length(), seconds / tokens
        before = self._prices.get(bits, price)
        self._prices[bits] = before + (price - before) * LEARNING

    def size(self, tokens: int) -> int:
        """The chunk for a prompt with this many tokens to compute."""
        if tokens < 2 * self._least:
            return tokens
        self._prompts += 1
        size = max(self._least, -(-tokens // PARTS))
        if self._prompts % AGAIN:
            while 2 * size <= tokens and self._costs_more(size):
                size *= 2
        return size

    def _costs_more(self, size: int) -> bool:
        """Whether steps of this size are slower than larger ones, or none was larger: then the next size is measured first."""
        bits = size.bit_length()
        larger = [price for other, price in self._prices.items() if other > bits]
        return not larger or self._prices.get(bits, 0.0) > (1.0 + COST_MAX) * min(larger)
