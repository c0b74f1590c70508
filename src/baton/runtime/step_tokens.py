"""How many tokens the steps of an engine compute, as a histogram: counted here, shown by observe/metrics.py."""

from __future__ import annotations

from bisect import bisect_left

from baton.protocol.control import STEP_TOKEN_BUCKETS, STEP_TOKEN_SUM


class StepTokens:
    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_TOKEN_BUCKETS) + 1)
        "By bucket, and those above the last one."
        self._sum = 0

    def observe(self, tokens: int) -> None:
        self._counts[bisect_left(STEP_TOKEN_BUCKETS, tokens)] += 1
        self._sum += tokens

    def table(self) -> dict[str, int]:
        """InstanceStats.step_tokens."""
        names = (*map(str, STEP_TOKEN_BUCKETS), "+Inf")
        return {**dict(zip(names, self._counts, strict=True)), STEP_TOKEN_SUM: self._sum}
