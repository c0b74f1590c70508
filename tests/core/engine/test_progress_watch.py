"""Stalled: work is due, and the word has not changed for a second."""

import pytest

from baton.core.engine.progress_watch import STALL_SECONDS, ProgressWatch


def watched(*looks):
    """Reports of the watch: (time, word, whether work is due)."""
    watch, said = ProgressWatch(), []
    for now, word, due in looks:
        watch.observe(word, due, now)
        said.append(watch.stalled_seconds(now))
    return said


def test_a_second_without_change_is_a_stall():
    assert watched((0.0, 7, True), (0.9, 7, True), (1.0, 7, True), (2.5, 7, True)) == [0, 0, 1.0, 2.5]


def test_a_long_honest_step_is_none():
    assert watched(*((0.5 * tick, tick, True) for tick in range(200))) == [0] * 200


def test_it_is_over_as_soon_as_something_moves():
    assert watched((0, 7, True), (5, 7, True), (5.1, 8, True), (6, 8, True), (6.2, 8, True)) == [0, 5, 0, 0, pytest.approx(1.1)]


def test_without_work_nothing_is_expected():
    assert watched((0, 7, False), (9, 7, False), (50, 7, False)) == [0, 0, 0]


def test_the_time_runs_from_when_work_is_due():
    """A worker that was stopped while it was idle is given its second."""
    assert watched((0, 7, True), (0.1, 7, False), (50, 7, True), (50.9, 7, True), (51, 7, True)) == [0, 0, 0, 0, 1]


def test_of_a_worker_without_a_word_nothing_is_known():
    assert watched((0, None, True), (99, None, True), (99, 3, True), (99.5, 3, True)) == [0] * 4


def test_a_word_that_falls_is_another_workers():
    assert watched((0, 700, True), (0.9, 3, True), (1.5, 3, True)) == [0, 0, 0]


def test_a_clock_that_goes_backwards_is_no_stall():
    assert watched((100, 7, True), (50, 7, True), (50.5, 7, True), (51.5, 7, True)) == [0, 0, 0, 1.5]


def test_looking_twice_at_one_time_changes_nothing():
    watch = ProgressWatch()
    for now in (0.0, 0.0, STALL_SECONDS, STALL_SECONDS):
        watch.observe(7, True, now)
    assert watch.stalled_seconds(STALL_SECONDS) == STALL_SECONDS
