"""How many tokens the steps of an engine compute, as a histogram: counted here, shown by observe/metrics.py."""

from __future__ import annotations

from typing import Final

from baton.protocol.control import STEP_TOKEN_BUCKETS, STEP_TOKEN_SUM

_LAST: Final = len(STEP_TOKEN_BUCKETS)
_NAMES: Final = (*map(str, STEP_TOKEN_BUCKETS), "+Inf")


class StepTokens:
    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (_LAST + 1)
        "By bucket, and those above the last one."
        self._sum = 0

    def observe(self, tokens: int) -> None:
        """The buckets are powers of two, so the length of the number in bits is its bucket."""
        bucket = (tokens - 1).bit_length() if tokens > 1 else 0
        self._counts[bucket if bucket < _LAST else _LAST] += 1
        self._sum += tokens

    def table(self) -> dict[str, int]:
        """InstanceStats.step_tokens."""
        return {**dict(zip(_NAMES, self._counts, strict=True)), STEP_TOKEN_SUM: self._sum}
