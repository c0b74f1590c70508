"""A worker without work is asked whether it is there: what counts as an answer, and what as a fault."""

from __future__ import annotations

import os

from baton.core.engine.idle_probe import ANSWER_SECONDS, PROBE_SECONDS, IdleProbe
from baton.protocol.progress import ProgressWord
from baton.runtime.engine.worker_health import WorkerHealth


class Rig:
    def __init__(self) -> None:
        self.probe = IdleProbe()
        self.asked = 0

    def observe(self, now: float, idle: bool = True) -> str:
        return self.probe.observe(now, idle=idle, ask=self._ask)

    def _ask(self) -> None:
        self.asked += 1


def test_it_is_asked_once_at_a_time_and_about_once_a_second():
    rig = Rig()
    for now in (0.0, 0.3, 0.6):
        assert rig.observe(now) == ""
    assert rig.asked == 1
    rig.probe.answered(0.7)
    rig.observe(0.8)
    rig.observe(0.7 + PROBE_SECONDS - 0.01)
    assert rig.asked == 1
    rig.observe(0.7 + PROBE_SECONDS)
    assert rig.asked == 2


def test_one_that_does_not_answer_is_at_fault_until_it_does():
    rig = Rig()
    rig.observe(0.0)
    assert rig.observe(ANSWER_SECONDS) == ""
    assert rig.observe(ANSWER_SECONDS + 0.5) == "the worker has not answered for 1.5 s"
    rig.probe.answered(3.0)
    assert rig.observe(3.1) == ""


def test_the_time_of_its_silence_is_known_until_it_answers():
    rig = Rig()
    for now in (0.0, 1.0, 2.5):
        rig.observe(now)
    assert rig.probe.silent_seconds(2.5) == 2.5
    rig.probe.answered(3.0)
    assert rig.probe.silent_seconds(3.5) == 0.0


def test_silence_while_the_engine_itself_was_stopped_does_not_count():
    """The answer may wait unread."""
    rig = Rig()
    rig.observe(0.0)
    assert rig.observe(90.0) == ""
    assert rig.probe.silent_seconds(90.0) == 0.0
    assert rig.observe(91.5) == "the worker has not answered for 1.5 s"


def test_a_question_of_before_its_work_is_forgotten():
    """While it works its progress is watched, and pings wait behind a long step."""
    rig = Rig()
    rig.observe(0.0)
    assert rig.observe(5.0, idle=False) == ""
    assert rig.observe(9.0) == ""
    assert rig.asked == 2


def test_progress_is_a_change_since_the_last_look_and_the_word_of_the_last_worker_is_closed():
    before = len(os.listdir("/proc/self/fd"))
    health = WorkerHealth()
    assert not health.progressed()
    for _ in range(3):  # lives
        word = ProgressWord.create()
        health.attach(os.dup(word.fd))
        word.advance()
        assert health.progressed()
        assert not health.progressed()
        word.advance()
        assert health.progressed()
        word.close()
    health.detach()
    assert not health.known
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_set_progresses_when_each_of_its_ranks_has():
    """The others of one that hangs wait in their next exchange, a step ahead at most."""
    health, words = WorkerHealth(), [ProgressWord.create() for _ in range(3)]
    for rank, word in enumerate(words):
        health.attach(os.dup(word.fd), rank)
    health.progressed()
    for late in range(3):
        for word in (word for rank, word in enumerate(words) if rank != late):
            word.advance()
            assert not health.progressed()
        words[late].advance()
        assert health.progressed()
    health.detach()
    assert not health.known
    for word in words:
        word.close()
