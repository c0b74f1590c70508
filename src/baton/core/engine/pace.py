"""How many prompt tokens a step has room for while others decode: as many as their next token can wait for.

A fixed number is wrong on every machine but one, and for every model but one. So the price of a prompt token is learned from
the steps themselves, and the step is kept to `decode_gap_seconds`, or where decoding alone takes long to three times that, and
to twice where a reader would see the text stutter:

    step        |-- decoding --|------ prompt tokens ------|
                ^              price * tokens              ^ the gap that every stream sees

A price that rises counts at once, one that falls slowly: a long context costs more per token with every chunk, and the next
chunk must not be the one that finds out.
"""

from __future__ import annotations

from typing import Final

from baton.config import SchedulerConfig

CHUNK_MIN: Final = 16
"""Prompt tokens of a step at the least, and what more are a multiple of: kernels work on so many rows at once."""
FIRST_CHUNK: Final = 32
"""While nothing is known yet."""
SLOWDOWN_MAX: Final = 3.0
"""How much longer than decoding alone a step may take, where decoding alone takes long."""
GAP_SEEN: Final = 0.09
"""Seconds. The goal for slow machines is 99 of 100 gaps below 100 ms; a tenth is left for what steps vary by."""
SLOWDOWN_SEEN: Final = 2.0
"""The same for steps that take longer than that: prompts still get half of the time."""
LEARNING: Final = 0.125


class StepPace:
    __slots__ = ("_decode_seconds", "_goal", "_limit", "price")

    def __init__(self, config: SchedulerConfig) -> None:
        self._goal = config.decode_gap_seconds
        self._limit = config.prefill_tokens_beside_decodes or config.tokens_per_step
        self._decode_seconds: float | None = None
        "A step in which nothing but decoding happens."
        self.price: float | None = None
        "Seconds for one prompt token."

    def step_done(self, prompt_tokens: int, decoding: int, seconds: float) -> None:
        """A step that the worker was not idle before has taken so long."""
        if seconds <= 0.0:
            return  # its result came with the one before
        if not prompt_tokens:
            self._decode_seconds = _average(self._decode_seconds, seconds)
            return
        rest = seconds - (self._decode_seconds or 0.0 if decoding else 0.0)
        price = max(rest, 0.0) / prompt_tokens
        if self.price is not None and price > self.price:
            self.price = (self.price + price) / 2
        else:
            self.price = _average(self.price, price)

    def prompt_tokens(self) -> int:
        """For the next step in which others decode."""
        if self._goal is None:
            return self._limit
        if not self.price:
            return min(self._limit, FIRST_CHUNK)
        decoding = self._decode_seconds or 0.0
        slowed = min(SLOWDOWN_MAX * decoding, max(GAP_SEEN, SLOWDOWN_SEEN * decoding))
        room = (max(self._goal, slowed) - decoding) / self.price
        return min(self._limit, max(CHUNK_MIN, int(room) // CHUNK_MIN * CHUNK_MIN))


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + (new - old) * LEARNING
