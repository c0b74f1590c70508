"""A histogram for values observed at every token, and a dozen times per request. The library's own takes a lock for each bucket
and the sum, about 5 us per observation; this one is a list that only the loop's thread writes, about 0.3 us."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenHistogram(Collector):
    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._edges = list(buckets)
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0

    def observe(self, total: float, count: int = 1) -> None:
        """Observe `count` equal values that add up to `total`."""
        self._counts[bisect_left(self._edges, total / count)] += count
        self._sum += total

    def collect(self) -> Iterator[Metric]:
        edges = [*map(floatToGoString, self._edges), "+Inf"]
        below = list(accumulate(self._counts))
        yield HistogramMetricFamily(self._name, self._text, list(zip(edges, below, strict=True)), self._sum)
