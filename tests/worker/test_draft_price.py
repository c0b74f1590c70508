"""Drafts run where they pay: by the time of steps that were measured, and by what each sequence accepted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.worker.drafters.price import ASK_INTERVALS, FIRST_SHARE, ROWS_MAX, DraftPrice
from baton.worker.drafters.step_times import COSTS_MAX, FORGET_STEPS, UNITS_MAX
from baton.worker.grammar_masks import GrammarMasks, GrammarState


def price(*seconds: float, slots: int = 1) -> DraftPrice:
    """`seconds`: of steps with 1, 2, ... rows."""
    one = DraftPrice()
    for slot in range(slots):
        one.assign_slot(slot)
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
    share = 1 - (1 - FIRST_SHARE) * 4 / 5 * 5 / 6 * 6 / 7
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


def test_expected_text_has_a_share_of_its_own():
    """It runs at once. Guesses that are wrong do not end it, and it does not begin them."""
    one = price(1.0, 1.2, 1.4)
    one.proposed(0, expected=2)
    assert one.choose(1, {0: 2}) == {0: 2}
    one.proposed(0, expected=0)
    assert one.choose(1, {0: 2}) == {}
    for _ in range(20):
        one.accepted(0, 1, 0)
    one.proposed(0, expected=2)
    assert one.choose(1, {0: 2}) == {0: 2}
    one.not_run(0, 2, 9)
    one.proposed(0, expected=0)
    for _ in range(20):
        one.accepted(0, 1, 1)
    one.known(0, np.array([4, 5, 6], np.int32))  # expected text that was not run was wrong
    assert one.choose(1, {0: 2}) == {0: 2}
    one.proposed(0, expected=2)
    for _ in range(20):
        one.accepted(0, 1, 0)
    assert one.choose(1, {0: 2}) == {}


def test_guesses_behind_expected_text_have_the_share_of_guesses():
    one = price(1.0, 1.05, 1.1, 1.15, 1.2)
    one.proposed(0, expected=2)
    assert one.choose(1, {0: 4}) == {0: 3}, "the third is worth its row: 0.9 * 0.9 * 0.2 more tokens"
    for _ in range(20):
        one.accepted(0, 4, 2)
    assert one.choose(1, {0: 4}) == {0: 2}
    for _ in range(20):
        one.accepted(0, 4, 4)
    assert one.choose(1, {0: 4}) == {0: 4}
    for _ in range(60):
        one.accepted(0, 4, 0)  # nothing was learned about the guesses: they did not follow
    one.proposed(0, expected=0)
    assert one.choose(1, {0: 4}) == {0: 4}
    one.proposed(0, expected=2)
    assert one.choose(1, {0: 4}) == {}


@pytest.mark.parametrize("sequences", [1, 7, 300])
def test_bounds(sequences):
    one = DraftPrice()
    for slot in range(sequences):
        one.assign_slot(slot)
    for rows in range(1, 5 * FORGET_STEPS):
        one.measured(rows, 1.0)
    assert sum(one.choose(sequences, dict.fromkeys(range(sequences), 16)).values()) <= ROWS_MAX
    assert sorted(one._times._costs) == sorted(one._times._measured) == one._times._sizes
    assert len(one._times._costs) <= 2 * FORGET_STEPS
    assert one.seconds(100_000) > 0


def test_one_slow_moment_does_not_exclude_a_size_for_ever():
    one = price(1.0, 50.0)
    for _ in range(10):
        one.accepted(0, 1, 1)
    assert one.choose(1, {0: 1}) == {}
    for _ in range(2 * FORGET_STEPS):
        one.measured(1, 1.0)
    assert one.choose(1, {0: 1}) == {0: 1}


def test_a_slow_moment_moves_no_price():
    """A step that another program held up, at a size that is measured often and at one that is measured rarely."""
    one = price(1.0, 1.2)
    for _ in range(10):
        one.accepted(0, 1, 1)
        one.measured(1, 1.0)
    one.measured(2, 1.2)
    one.measured(2, 30.0)
    one.measured(1, 30.0)
    assert one.seconds(1) == pytest.approx(1.0)
    assert one.seconds(2) == pytest.approx(1.2)
    assert one.choose(1, {0: 1}) == {0: 1}


def test_a_slow_while_is_no_matter_of_rows():
    """Steps with two rows were last measured before the machine became slow, or were only measured while it was."""
    one = price(1.0, 1.4)
    for _ in range(UNITS_MAX):
        one.measured(1, 3.0)
    assert one.seconds(2) / one.seconds(1) == pytest.approx(1.4)
    one.measured(3, 5.4)
    for _ in range(UNITS_MAX):
        one.measured(1, 1.0)
    assert one.seconds(3) / one.seconds(1) == pytest.approx(1.8)


def test_a_size_that_has_become_slower_is_learned():
    one = price(1.0, 1.2)
    for _ in range(COSTS_MAX):
        one.measured(2, 1.9)
        one.measured(1, 1.0)
        one.measured(1, 1.0)
    assert one.seconds(2) / one.seconds(1) == pytest.approx(1.9)


def test_more_rows_are_never_faster():
    assert price(1.0, 0.5, 0.4).choose(1, {0: 2}) == price(1.0, 1.0, 1.0).choose(1, {0: 2})
    one = price(1.0, 0.2)
    for _ in range(20):
        one.accepted(0, 1, 0)
    assert one.choose(1, {0: 1}) == {}, "wrong drafts do not pay, however fast their step seemed"
    dear = price(1.0, 2.5, 1.1)
    for _ in range(3):
        dear.accepted(0, 2, 2)
    assert dear.choose(1, {0: 2}) == {0: 2}, "a size that was once slow says nothing about larger ones"


def test_sizes_that_were_not_measured_are_dearer_than_those_that_were():
    """Two neighbours that differ by chance once made twelve rows cost half of four."""
    one = price(1.0, 1.0, 1.1, 1.0)
    assert one.seconds(12) > 1.5
    steep = price(1.0, 1.5, 2.0, 2.4)
    assert steep.seconds(7) == pytest.approx(2.4 + 3 * 1.4 / 3)
    assert steep.seconds(3) == 2.0
    assert price(1.0, 1.0, 1.1, 1.0).seconds(100_000) > 0


def test_sequences_without_promising_drafts_are_asked_rarely():
    one = price(1.0, 1.2, slots=3)

    def asks(steps: int, found: bool) -> list[int]:
        """Steps that ask for slot 1."""
        asked = []
        for step in range(steps):
            if one.worth_asking(1):
                asked.append(step)
                one.asked(1, found=found)
            one.tried(found=False)
        return asked

    assert asks(8, True) == list(range(8)), "its first share is not hopeless"
    few = asks(64, False)
    assert len(few) < 20
    assert [after - before for before, after in zip(few[-4:], few[-3:], strict=False)] == [ASK_INTERVALS[-1]] * 3
    assert one.worth_asking(0), "others are asked as before"
    for _ in range(40):
        one.accepted(1, 1, 0)
    assert len(asks(64, True)) < 12, "hopeless drafts are as good as none"
    for _ in range(4):
        one.accepted(1, 1, 1)
    assert len(asks(64, True)) > 50
    one.assign_slot(1)
    assert len(asks(8, True)) == 8


def test_sequences_with_a_grammar_and_steps_that_wait_are_always_asked():
    one, masks = price(1.0), GrammarMasks(None)
    one.assign_slot(0, GrammarState(masks))
    device = DraftPrice(0.02, waits=True)
    device.assign_slot(0)
    for each in (one, device):
        for _ in range(50):
            assert each.worth_asking(0)
            each.asked(0, found=False)
            each.tried(found=False)
    masks.close()


def test_steps_wait_the_less_the_longer_no_drafts_run():
    """A step is asked about once or more. Each that waits finds nothing: the pauses double."""
    one, waited = DraftPrice(), list[int]()
    for step in range(70):
        assert one.worth_waiting(step) == one.worth_waiting(step) == one.has_waited(step)
        if one.has_waited(step):
            waited.append(step)
            one.tried(found=False)
    assert waited == [0, 2, 6, 14, 30, 46, 62]
    one.tried(found=True)
    assert all(one.worth_waiting(step) for step in range(70, 80))


def test_a_share_settles():
    """Drafts of a sequence that are right three times in four are worth their rows nearly always."""
    one, rng = price(1.0, 1.1, 1.2, 1.3, 1.4), random.Random(3)
    run = 0
    for _ in range(400):
        one.accepted(0, 1, int(rng.random() < 0.75))
        run += bool(one.choose(1, {0: 4}))
    assert run > 390


def test_waiting_is_measured_before_drafts_run_and_counts_once():
    one = DraftPrice(0.02, waits=True)
    for slot in range(16):
        one.assign_slot(slot)
        for _ in range(20):
            one.accepted(slot, 4, 4)
    drafts = dict.fromkeys(range(16), 4)
    one.measured(16, 1.0)
    assert one.choose(16, drafts) == {}
    one.waited_for_nothing(16, 1.5)
    assert one.choose(16, drafts) == drafts  # 80 tokens instead of 16 in about 2.5 times the time
    one.measured(80, 2.0, waited=True)
    assert one.seconds(80) == pytest.approx(1.5)
    dear = DraftPrice(0.02, waits=True)
    dear.assign_slot(0)
    dear.measured(1, 1.0)
    dear.waited_for_nothing(1, 9.0)
    assert dear.choose(1, {0: 4}) == {}
