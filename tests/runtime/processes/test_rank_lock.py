"""Ranks reserve memory one after the other, and none waits for ever."""

import pytest

from baton.errors import EngineError
from baton.runtime.processes.rank_lock import one_rank_at_a_time


def test_a_rank_that_keeps_the_others_waiting_is_an_error(tmp_path):
    with (
        one_rank_at_a_time(str(tmp_path), 5.0),
        pytest.raises(EngineError, match="another rank has been reserving its memory"),
        one_rank_at_a_time(str(tmp_path), 0.01),
    ):
        pytest.fail("two ranks reserve at once")


def test_the_next_rank_follows(tmp_path):
    for _ in range(2):
        with one_rank_at_a_time(str(tmp_path), 5.0):
            pass


def test_one_rank_needs_no_lock():
    with one_rank_at_a_time("", 0.0):
        pass
