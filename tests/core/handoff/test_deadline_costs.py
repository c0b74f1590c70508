"""The next deadline of reservations costs the same with many of them as with few: it is asked after every event.

Costs are counted: comparisons of times, and calls of functions, also of Python's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import log2
from typing import Any

import pytest

from baton.core.events import Tick
from baton.core.handoff.destination import Destination
from baton.core.instance import Instance
from baton.protocol.handoff import Reserve

from ..engine.harness import make_request
from ..engine.pair import Node

FEW, MANY = 10, 1_000
RENEWED = 20
"""Renewals of each lease."""


class CountedTime(float):
    """A time that counts comparisons."""

    count = 0

    def __add__(self, seconds: float) -> CountedTime:
        return CountedTime(float(self) + seconds)


def _counting(name: str) -> Callable[[CountedTime, object], Any]:
    compare = getattr(float, name)

    def counted(mine: CountedTime, other: object) -> Any:
        CountedTime.count += 1
        return compare(mine, other)

    return counted


for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__"):
    setattr(CountedTime, _name, _counting(_name))


def comparisons(act: Callable[[], object]) -> int:
    before = CountedTime.count
    act()
    return CountedTime.count - before


def calls(act: Callable[[], object]) -> int:
    counted = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        act()
    finally:
        sys.setprofile(before)
    return counted


def reserved(count: int) -> Instance:
    """A decode instance with this many reservations, each with a deadline of its own, the latest first."""
    node = Node("decode", blocks=4 * MANY, slots=4, reservations_max=MANY)
    for number in range(count):
        renew(node.instance, number, 1_000.0 - number * 0.1)
    assert len(destination(node.instance)) == len(destination(node.instance).deadlines) == count
    return node.instance


def renew(instance: Instance, number: int, seconds: float) -> None:
    request = make_request(f"r{number}", (number, 1, 2, 3), max_tokens=4)
    instance.handle(Reserve(request, seconds), CountedTime(1.0))


def destination(instance: Instance) -> Destination:
    return instance._handoff._destination


def test_asking_costs_the_same_with_a_hundred_times_as_many():
    few, many = reserved(FEW), reserved(MANY)
    assert few.next_deadline() == 1_001.0 - (FEW - 1) * 0.1
    assert many.next_deadline() == 1_001.0 - (MANY - 1) * 0.1
    assert comparisons(few.next_deadline) == comparisons(many.next_deadline) <= 10
    assert calls(few.next_deadline) == calls(many.next_deadline)


def test_an_event_at_which_none_is_due_costs_the_same():
    few, many = reserved(FEW), reserved(MANY)

    def tick(instance: Instance) -> Callable[[], object]:
        return lambda: instance.handle(Tick(), CountedTime(2.0))

    assert comparisons(tick(few)) == comparisons(tick(many))
    assert calls(tick(few)) == calls(tick(many))


@pytest.mark.parametrize("count", [FEW, MANY])
def test_renewing_every_lease_costs_each_no_more_than_a_place_in_a_heap(count):
    """Each renewal leaves a stale entry, which is removed once."""
    deadlines = destination(reserved(count)).deadlines
    leases = [entry[2] for entry in deadlines._heap]

    def renew_all() -> None:
        for turn in range(RENEWED):
            for lease in leases:
                deadlines.set(lease, CountedTime(2_000.0 + turn))

    assert comparisons(renew_all) / (RENEWED * count) < 4 * (1 + log2(count))
    assert deadlines.earliest == 2_000.0 + RENEWED - 1
