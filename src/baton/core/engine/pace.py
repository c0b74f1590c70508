"""Limits the prompt tokens of a step while other sequences decode: their next token waits for the whole step.

A fixed number is wrong on every machine but one, and for every model but one. So the price of a prompt token is learned from
the steps themselves. A step is limited to `decode_gap_seconds`; where decoding alone takes long, to three times that time, and
to twice where a reader would see the text stutter:

    step        |-- decoding --|------ prompt tokens ------|
                ^              price * tokens              ^ the gap that every stream sees

A rising price counts at once, a falling one slowly: a long context costs more per token with every chunk, and the next chunk
must not be the one that finds out.

A step with prompts may also have a fixed cost whatever their size (other kernels, no graph). Small chunks alone cannot
distinguish that cost from the price: it would look like a price that is too high for larger ones, and prompts would crawl. So
steps of up to CHUNK_MIN tokens and larger ones are averaged apart, and the straight line through both averages gives cost and
price:

    seconds beyond decoding   cost |---- price * tokens ----|

Prompts get the time that the goal leaves beside the cost, and where the cost takes most of it at least as much as the cost.
Where all steps are at the minimum, one in TRY_LARGER is larger, to have both averages.
"""

from __future__ import annotations

from typing import Final

from baton.config import SchedulerConfig
from baton.core.engine.handoff_chunks import HandoffChunks

CHUNK_MIN: Final = 16
"""Minimum of prompt tokens in a step; larger numbers are multiples of it, because kernels work on this many rows at once."""
FIRST_CHUNK: Final = 32
"""Prompt tokens while no step has been measured."""
SLOWDOWN_MAX: Final = 3.0
"""Longest step relative to decoding alone, where decoding alone takes long."""
GAP_SEEN: Final = 0.09
"""Seconds. The goal for slow machines is 99 of 100 gaps below 100 ms; a tenth is left for the variation of steps."""
SLOWDOWN_SEEN: Final = 2.0
"""SLOWDOWN_MAX for steps that take longer than GAP_SEEN: prompts still get half of the time."""
LEARNING: Final = 0.125
TRY_LARGER: Final = 128
"""Number of steps with the least prompt tokens of which one has twice as many: less than one in a hundred gaps is longer for
it."""


class MixedSteps:
    """Averages of steps of similar size: prompt tokens, and seconds beyond decoding."""

    __slots__ = ("seconds", "tokens")

    def __init__(self, tokens: int, seconds: float) -> None:
        self.tokens = float(tokens)
        self.seconds = seconds

    def add(self, tokens: int, seconds: float) -> None:
        rises = seconds * self.tokens > self.seconds * tokens
        share = 0.5 if rises else LEARNING
        self.tokens += (tokens - self.tokens) * share
        self.seconds += (seconds - self.seconds) * share


class StepPace:
    __slots__ = ("_at_least", "_decode_seconds", "_goal", "_large", "_limit", "_small", "chunks", "price")

    def __init__(self, config: SchedulerConfig) -> None:
        self._goal = config.decode_gap_seconds
        self._limit = config.prefill_tokens_beside_decodes or config.tokens_per_step
        self._decode_seconds: float | None = None
        "Average seconds of a step that only decodes."
        self.chunks = HandoffChunks(config.handoff_chunk_tokens_min)
        self.price: float | None = None
        "Seconds per prompt token, its share of a step's fixed cost included."
        self._small: MixedSteps | None = None
        "Averages of steps beside decodes with up to CHUNK_MIN prompt tokens."
        self._large: MixedSteps | None = None
        "Averages of steps beside decodes with more than CHUNK_MIN prompt tokens."
        self._at_least = 0
        "Number of steps with CHUNK_MIN tokens since the last larger one."

    def step_done(self, prompt_tokens: int, decoding: int, seconds: float, *, drafted: bool = False) -> None:
        """Learn from a step of which the worker was busy from begin to end. `drafted`: it verified drafts, which steps with
        prompts do not have: it shows how long decoding takes only while nothing else does."""
        if seconds <= 0.0:
            return  # the result came together with the previous one
        if not prompt_tokens:
            if drafted and self._decode_seconds is not None:
                return
            self._decode_seconds = _average(self._decode_seconds, seconds)
            return
        if not decoding:
            self.chunks.step_done(prompt_tokens, seconds)
        rest = seconds - (self._decode_seconds or 0.0 if decoding else 0.0)
        price = max(rest, 0.0) / prompt_tokens
        if self.price is not None and price > self.price:
            self.price = (self.price + price) / 2
        else:
            self.price = _average(self.price, price)
        if decoding and self._decode_seconds is not None:
            self._mixed_step(prompt_tokens, max(rest, 0.0))

    def _mixed_step(self, tokens: int, seconds: float) -> None:
        if tokens > CHUNK_MIN:
            self._at_least = 0
            if self._large is None:
                self._large = MixedSteps(tokens, seconds)
            self._large.add(tokens, seconds)
        else:
            self._at_least += tokens == CHUNK_MIN
            if self._small is None:
                self._small = MixedSteps(tokens, seconds)
            self._small.add(tokens, seconds)

    def prompt_tokens(self) -> int:
        """Prompt tokens for the next step in which other sequences decode."""
        if self._goal is None:
            return self._limit
        if not self.price:
            return min(self._limit, FIRST_CHUNK)
        decoding = self._decode_seconds or 0.0
        slowed = min(SLOWDOWN_MAX * decoding, max(GAP_SEEN, SLOWDOWN_SEEN * decoding))
        room = self._tokens_in(max(self._goal, slowed) - decoding)
        least = 2 * CHUNK_MIN if self._at_least >= TRY_LARGER else CHUNK_MIN
        return min(self._limit, max(least, int(room) // CHUNK_MIN * CHUNK_MIN))

    def _tokens_in(self, seconds: float) -> float:
        """Prompt tokens that fit into these seconds beyond decoding."""
        assert self.price
        small, large = self._small, self._large
        if small is None or large is None or large.seconds <= small.seconds:
            return seconds / self.price
        price = (large.seconds - small.seconds) / (large.tokens - small.tokens)
        cost = large.seconds - price * large.tokens
        if cost <= 0.0:
            return seconds / self.price
        # At most twice the measured size: beyond that the straight line is a guess.
        return min(max(seconds - cost, cost) / price, 2 * large.tokens)


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + (new - old) * LEARNING
