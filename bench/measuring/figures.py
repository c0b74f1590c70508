"""From times to figures.

A driver tells of every step when it ended and how many tokens it gave:

    steps   [[0.31, 20], [0.35, 32], [0.39, 32], [0.43, 32], [0.47, 12]]     32 sequences
                         |---------- full ---------|

Decoding alone is what lies between two full steps in a row, in which every sequence got one token: no prompt was computed
there and no sequence was missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

Steps = Sequence[tuple[float, int]]


class NotMeasured(Exception):
    """There is no figure; the message says why."""


def full_steps(steps: Steps, sequences: int) -> list[float]:
    """Seconds of every step in which all sequences got a token, and in the one before it too."""
    return [late[0] - early[0] for early, late in pairwise(steps) if early[1] == sequences and late[1] == sequences]


def decode_rate(steps: Steps) -> float:
    """Tokens a second of one stream after its first token."""
    if len(steps) < 2 or steps[-1][0] <= steps[0][0]:
        raise NotMeasured("too few steps")
    first = next(index for index, (_, tokens) in enumerate(steps) if tokens)
    return sum(tokens for _, tokens in steps[first + 1 :]) / (steps[-1][0] - steps[first][0])


def step_seconds(steps: Steps, sequences: int) -> float:
    """The median full step: one that was disturbed does not count more than one that was not."""
    found = full_steps(steps, sequences)
    if len(found) < 3:
        raise NotMeasured(f"{len(found)} steps in which all {sequences} sequences ran")
    return median(found)


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest, as numpy does."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Line:
    """y = base + slope * x, by least squares."""

    base: float
    slope: float
    fit: float
    "R squared: 1 is a straight line."


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    if len({x for x, _ in points}) < 2:
        raise NotMeasured("a line needs two points")
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    base = mean_y - slope * mean_x
    spread = sum((y - mean_y) ** 2 for _, y in points)
    rest = sum((y - base - slope * x) ** 2 for x, y in points)
    return Line(base, slope, 1.0 - rest / spread if spread else 1.0)


def largest_rise(costs: Sequence[float]) -> float:
    """How much dearer a value is than the cheapest before it: 0.05 is 5 % more. Falling costs give 0."""
    rise, cheapest = 0.0, costs[0]
    for cost in costs[1:]:
        rise = max(rise, cost / cheapest - 1.0)
        cheapest = min(cheapest, cost)
    return rise
