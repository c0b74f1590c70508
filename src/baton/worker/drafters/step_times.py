"""Time of steps without prompts, by their number of rows.

    seconds of a step = seconds of a unit now * cost of its rows in units

Another program may slow the machine down for a while, and sizes are measured at different times. So the unit follows the latest
steps of any size, and the cost of a size is measured in units of that time: two sizes stay comparable. Both are medians of few
measurements, so one slow moment moves neither.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Final

UNITS_MAX: Final = 5
"""Number of latest steps that the unit is the median of."""
COSTS_MAX: Final = 7
"""Number of latest measurements that the cost of a size is the median of."""
FORGET_STEPS: Final = 128
"""Steps without a new measurement after which the cost of a size is forgotten, so that no size is excluded for ever."""


class StepTimes:
    __slots__ = ("_costs", "_measured", "_recent", "_row_cost", "_sizes", "_steps", "_unit", "_units")

    def __init__(self, row_cost: float) -> None:
        """`row_cost`: assumed cost of one more row, as a share of a step with one row, until more rows are measured."""
        self._row_cost = row_cost
        self._unit = 1.0
        self._units: deque[float] = deque(maxlen=UNITS_MAX)
        self._measured: dict[int, deque[float]] = {}
        "Latest costs by number of rows."
        self._costs: dict[int, float] = {}
        "Medians of those."
        self._sizes: list[int] = []
        "Keys of `_costs`, sorted."
        self._steps = 0
        self._recent: set[int] = set()
        "Sizes measured since sizes were last forgotten."

    def __contains__(self, rows: int) -> bool:
        return rows in self._costs

    def __bool__(self) -> bool:
        """Whether the time of any step is known."""
        return bool(self._sizes)

    def measured(self, rows: int, seconds: float) -> None:
        self._forget()
        if rows in self._costs or not self._sizes:
            self._units.append(seconds / self._costs.get(rows, self._cost(rows)))
            self._unit = _median(self._units)
        costs = self._measured.get(rows)
        if costs is None:
            costs = self._measured[rows] = deque(maxlen=COSTS_MAX)
            insort(self._sizes, rows)
        costs.append(seconds / self._unit)
        self._costs[rows] = _median(costs)
        self._recent.add(rows)

    def seconds(self, rows: int) -> float:
        """Expected seconds of a step with this many rows."""
        return self._unit * self._cost(rows)

    def _cost(self, rows: int) -> float:
        """Measured, interpolated between two measured sizes, or extrapolated."""
        if (known := self._costs.get(rows)) is not None:
            return known
        sizes, costs = self._sizes, self._costs
        assumed = 1.0 + self._row_cost * (rows - 1)
        if not sizes:
            return assumed
        if len(sizes) == 1:
            return costs[sizes[0]] * assumed / (1.0 + self._row_cost * (sizes[0] - 1))
        at = bisect_left(sizes, rows)
        if at == len(sizes):  # two neighbours may differ by chance, and a line through them would lead anywhere
            low, high = sizes[0], sizes[-1]
            slope = max((costs[high] - costs[low]) / (high - low), 0.5 * self._row_cost * costs[low])
            return costs[high] + slope * (rows - high)
        low, high = sizes[max(at, 1) - 1], sizes[max(at, 1)]
        slope = (costs[high] - costs[low]) / (high - low)
        return max(costs[low] + slope * (rows - low), 0.5 * min(costs.values()))

    def _forget(self) -> None:
        self._steps += 1
        if self._steps % FORGET_STEPS == 0:
            self._sizes = sorted(self._recent)
            self._costs = {size: self._costs[size] for size in self._sizes}
            self._measured = {size: self._measured[size] for size in self._sizes}
            self._recent.clear()


def _median(values: deque[float]) -> float:
    """The lower one of two: what disturbs a step makes it slower."""
    return sorted(values)[(len(values) - 1) // 2]
