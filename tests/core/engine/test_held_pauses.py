"""A pause that is part of a caller's longer order: if the caller leaves in the middle, the instance serves again by itself."""

import pytest

from baton.core.effects import Mode
from baton.core.engine.worker_watch import WorkerState
from baton.core.events import CallerLeft, HoldPause, Pause, Resume, Sleep, Tick, Wake, WorkerStopped

from .harness import Driver


def held(driver: Driver, *, asleep: bool = False) -> Driver:
    driver.dispatch(Pause(number=1))
    driver.dispatch(HoldPause("7"))
    if asleep:
        driver.dispatch(Sleep(2))
        driver.dispatch(WorkerStopped())
        assert driver.instance.worker.state is WorkerState.ASLEEP
    return driver


def assert_serves(driver: Driver) -> None:
    assert driver.instance.mode is Mode.SERVING
    driver.submit("after", range(9), max_tokens=3)
    driver.run()
    driver.assert_answered("after")
    driver.assert_at_rest()


def test_an_instance_that_is_paused_for_its_caller_serves_when_the_caller_leaves():
    driver = held(Driver())
    assert driver.instance.mode is Mode.PAUSED
    driver.dispatch(CallerLeft("7"))
    assert_serves(driver)


def test_one_that_still_drains_goes_on():
    driver = Driver()
    driver.submit("before", max_tokens=3)
    held(driver)
    assert driver.instance.mode is Mode.DRAINING
    driver.dispatch(CallerLeft("7"))
    assert driver.orders[1] == "overtaken"
    driver.run()
    driver.assert_answered("before")
    assert_serves(driver)


def test_one_that_sleeps_is_woken():
    driver = held(Driver(), asleep=True)
    driver.dispatch(CallerLeft("7"))
    assert [restart.epoch for restart in driver.restarts] == [2]
    driver.restart_worker()
    assert_serves(driver)


def test_one_that_is_being_woken_serves_with_that_worker():
    driver = held(Driver(), asleep=True)
    driver.dispatch(Wake(3))
    driver.dispatch(CallerLeft("7"))
    assert len(driver.restarts) == 1, "no second worker is started"
    driver.restart_worker()
    assert driver.orders[3] == "done"
    assert_serves(driver)


def test_one_whose_worker_is_being_stopped_waits_for_the_stop_however_long_it_takes():
    driver = held(Driver(worker_stop_seconds_max=5.0))
    driver.dispatch(Sleep(2))
    driver.dispatch(CallerLeft("7"))
    assert not driver.restarts
    driver.now += 6.0
    driver.dispatch(Tick())
    assert driver.orders[2] == "refused"
    driver.dispatch(WorkerStopped())
    assert len(driver.restarts) == 1
    driver.restart_worker()
    assert_serves(driver)


@pytest.mark.parametrize("later", [[CallerLeft("8")], [Pause(number=5), CallerLeft("7")]], ids=["another", "a later pause"])
def test_no_other_pause_ends_with_a_caller(later: list):
    driver = held(Driver())
    for event in later:
        driver.dispatch(event)
    assert driver.instance.mode is Mode.PAUSED


def test_a_pause_of_a_caller_that_only_paused_outlives_it():
    driver = Driver()
    driver.dispatch(Pause(number=1))
    driver.dispatch(CallerLeft("7"))
    assert driver.instance.mode is Mode.PAUSED


def test_a_resumed_instance_is_held_by_no_one():
    driver = held(Driver())
    driver.dispatch(Resume(3))
    driver.dispatch(Pause(number=4))
    driver.dispatch(CallerLeft("7"))
    assert driver.instance.mode is Mode.PAUSED
