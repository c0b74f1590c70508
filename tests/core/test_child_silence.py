"""A child whose event loop hangs is found; one that had no time to answer is not taken for it."""

from __future__ import annotations

from baton.core.child_silence import PERIODS, SILENT_SECONDS_MAX, STARTING, ChildSilence
from baton.protocol.ids import Instant

PERIOD = SILENT_SECONDS_MAX / PERIODS


class Watched:
    """A child, its parent, and what the parent did at each call."""

    def __init__(self) -> None:
        self.silence = ChildSilence()
        self.now = 100.0

    def observe(self, after: float = PERIOD) -> str:
        self.now += after
        return self.silence.observe(Instant(self.now))

    def begun(self) -> Watched:
        """It has answered once."""
        assert self.observe() == "ping"
        self.silence.answered()
        return self

    def seconds_until_killed(self) -> float:
        begin = self.now
        while self.observe() != "kill":
            assert self.now - begin < 3600, "it is never killed"
        return self.now - begin


def test_a_child_that_answers_is_pinged_for_ever():
    watched = Watched().begun()
    for _ in range(1000):
        assert watched.observe() == "ping"
        assert watched.observe() == "wait", "one ping is open at a time"
        watched.silence.answered()


def test_a_child_that_does_not_answer_is_killed():
    watched = Watched().begun()
    assert watched.observe() == "ping"
    assert watched.seconds_until_killed() == SILENT_SECONDS_MAX
    assert watched.silence.seconds == SILENT_SECONDS_MAX


def test_a_late_answer_is_an_answer():
    watched = Watched().begun()
    for _ in range(3):
        assert watched.observe() == "ping"
        assert [watched.observe() for _ in range(PERIODS - 1)] == ["wait"] * (PERIODS - 1)
        watched.silence.answered()


def test_the_time_in_which_the_parent_was_stopped_does_not_count():
    """All processes are stopped for a minute, and go on: the answer is not read yet at the first call."""
    watched = Watched().begun()
    assert watched.observe() == "ping"
    assert [watched.observe() for _ in range(PERIODS - 1)] == ["wait"] * (PERIODS - 1)
    assert watched.observe(after=60.0) == "wait"
    assert watched.observe(after=-60.0) == "wait", "a clock that goes backwards counts nothing either"
    assert watched.observe() == "kill", "but the time before it does"


def test_a_parent_that_is_stopped_again_and_again_kills_nobody_and_finds_the_hang_later():
    watched = Watched().begun()
    assert watched.observe() == "ping"
    assert {watched.observe(after=60.0) for _ in range(100)} == {"wait"}
    assert watched.seconds_until_killed() == SILENT_SECONDS_MAX


def test_calls_that_come_a_little_late_count_as_long_as_they_took():
    watched = Watched().begun()
    assert watched.observe() == "ping"
    assert [watched.observe(after=PERIOD * 1.25) for _ in range(5)] == ["wait"] * 4 + ["kill"]


def test_a_child_that_is_starting_has_longer_and_not_for_ever():
    watched = Watched()
    assert watched.observe() == "ping"
    assert watched.seconds_until_killed() == STARTING * SILENT_SECONDS_MAX
