"""Deadlines for calls that have none."""

import threading

import pytest
from storage_rig import soon

from baton.kvcache.storage.backend import Deadline
from baton.kvcache.storage.thread_pool import ThreadPool


@pytest.fixture
def lanes():
    made = ThreadPool([(memoryview(bytearray(8)), number) for number in range(2)])
    yield made
    made.end()


def test_its_threads_end_with_it():
    before = {*threading.enumerate()}
    made = ThreadPool([(memoryview(bytearray(8)), number) for number in range(2)])
    threads = [thread for thread in threading.enumerate() if thread not in before]
    assert len(threads) == 2
    made.end()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_call_answers_or_raises(lanes):
    with lanes.idle_thread(soon()) as lane:
        assert lane.call(lambda: 7, soon()) == 7
        with pytest.raises(ZeroDivisionError):
            lane.call(lambda: 1 // 0, soon())
        assert lane.call(lambda: None, soon()) is None


def test_a_call_that_is_stuck_keeps_its_lane_until_it_ends(lanes):
    go_on = threading.Event()
    for _ in range(2):
        begun = threading.Event()
        with lanes.idle_thread(soon()) as lane:
            call = lane.start(lambda begun=begun: begun.set() or go_on.wait(60))
            assert begun.wait(60)
            with pytest.raises(TimeoutError):
                lane.wait(call, Deadline.after(0.01))
    with pytest.raises(TimeoutError), lanes.idle_thread(Deadline.after(0.01)):
        pass
    go_on.set()
    with lanes.idle_thread(soon()) as lane, lanes.idle_thread(soon()) as other:
        assert {lane.address, other.address} == {0, 1}, "each came back once"
        with pytest.raises(TimeoutError), lanes.idle_thread(Deadline.after(0.01)):
            pass


def test_calls_run_in_order_and_those_that_nobody_waits_for_any_more_are_not_begun(lanes):
    go_on, ran = threading.Event(), []
    with lanes.idle_thread(soon()) as lane:
        calls = [lane.start(lambda number=number: ran.append(number) or number) for number in range(5)]
        assert [lane.wait(call, soon()) for call in calls] == ran == list(range(5))
    with lanes.idle_thread(soon()) as lane:
        lane.start(lambda: go_on.wait(60))
        for _ in range(3):
            lane.start(lambda: ran.append("too late"))
    go_on.set()
    with lanes.idle_thread(soon()), lanes.idle_thread(soon()):
        assert "too late" not in ran


def test_a_call_that_ends_at_its_deadline_is_answered_or_given_up_never_both(lanes):
    for _ in range(300):
        try:
            with lanes.idle_thread(soon()) as lane:
                assert lane.call(lambda: 3, Deadline.after(0.00002)) == 3
        except TimeoutError:
            continue
    with (
        lanes.idle_thread(soon()),
        lanes.idle_thread(soon()),
        pytest.raises(TimeoutError),
        lanes.idle_thread(Deadline.after(0.05)),
    ):
        pass
