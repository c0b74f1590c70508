"""Drafts run where they pay: by the time of steps that were measured, and by what each sequence accepted."""

from __future__ import annotations

import numpy as np
import pytest

from baton.worker.drafters.price import FIRST_SHARE, FORGET_STEPS, ROWS_MAX, DraftPrice


def price(*seconds: float, slots: int = 1) -> DraftPrice:
    """`seconds`: of steps with 1, 2, ... rows."""
    one = DraftPrice()
    for slot in range(slots):
        one.seat(slot)
    for rows, each in enumerate(seconds, 1):
        one.measured(rows, each)
    return one


def test_free_rows_are_all_used():
    assert price(1.0, 1.0, 1.0, 1.0, 1.0).choose(1, {0: 4}) == {0: 4}


def test_rows_that_cost_a_step_each_are_not():
    assert price(1.0, 2.0, 3.0, 4.0, 5.0).choose(1, {0: 4}) == {}


def test_as_many_as_pay():
    one = price(1.0, 1.2, 1.4, 1.6, 1.8)
    for _ in range(3):
        one.accepted(0, 1, 1)
    share = 1 - (1 - FIRST_SHARE) * 0.8**3
    expected = max(range(5), key=lambda k: sum(share**j for j in range(k + 1)) / (1.0 + 0.2 * k))
    assert one.choose(1, {0: 4}) == {0: expected}
    for _ in range(30):
        one.accepted(0, 4, 4)
    assert one.choose(1, {0: 4}) == {0: 4}


def test_drafts_begin_when_they_would_have_been_right_and_end_when_they_are_wrong():
    one, tokens = price(1.0, 1.2, 1.4), np.array([4, 5, 6, 7], np.int32)
    assert one.choose(1, {0: 2}) == {}
    one.not_run(0, 2, 9)
    one.known(0, tokens)  # 6 came, not 9
    assert one.choose(1, {0: 2}) == {}
    for _ in range(2):
        one.not_run(0, 3, 7)
        one.known(0, tokens[:3])  # not known yet
        one.not_run(0, 3, 7)
        one.known(0, tokens)
    assert one.choose(1, {0: 2})
    for _ in range(10):
        one.accepted(0, 1, 0)
    assert one.choose(1, {0: 2}) == {}


def test_the_likeliest_sequences_come_first():
    one = price(1.0, 1.0, 1.1, 1.2, 1.3, 1.6, 1.9, slots=2)
    for _ in range(20):
        one.accepted(0, 2, 2)
        one.accepted(1, 2, 0)
    chosen = one.choose(2, {0: 3, 1: 3})
    assert chosen.get(0, 0) > chosen.get(1, 0)


@pytest.mark.parametrize("sequences", [1, 7, 300])
def test_bounds(sequences):
    one = DraftPrice()
    for slot in range(sequences):
        one.seat(slot)
    for rows in range(1, 5 * FORGET_STEPS):
        one.measured(rows, 1.0)
    assert sum(one.choose(sequences, dict.fromkeys(range(sequences), 16)).values()) <= ROWS_MAX
    assert sorted(one._seconds) == one._sizes
    assert len(one._seconds) <= 2 * FORGET_STEPS
    assert one.seconds(100_000) > 0


def test_one_slow_moment_does_not_exclude_a_size_for_ever():
    one = price(1.0, 50.0)
    for _ in range(10):
        one.accepted(0, 1, 1)
    assert one.choose(1, {0: 1}) == {}
    for _ in range(2 * FORGET_STEPS):
        one.measured(1, 1.0)
    assert one.choose(1, {0: 1}) == {0: 1}
