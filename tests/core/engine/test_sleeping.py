"""Sleep and wake: no worker is wanted, and later one is."""

from baton.core.effects import Mode, RestartWorker, StopWorker
from baton.core.engine.worker_watch import WorkerState
from baton.core.events import Pause, Resume, Sleep, Wake, WorkerLost, WorkerReady, WorkerStopped
from baton.protocol.control import OrderAnswer
from baton.protocol.ids import WorkerEpoch

from .harness import Driver, FakeWorker


def asleep() -> Driver:
    driver = Driver()
    driver.submit("a", range(9), max_tokens=3)
    driver.run()
    driver.dispatch(Pause())
    driver.dispatch(Sleep(1))
    driver.dispatch(WorkerStopped())
    assert driver.orders == {1: "done"}
    return driver


def test_a_paused_instance_gives_up_its_worker_and_gets_another():
    driver = asleep()
    assert driver.stopped == [2]
    assert driver.instance.next_deadline() is None, "it may sleep for ever"
    driver.submit("b", max_tokens=1)
    assert driver.refused["b"].reason == "paused"
    driver.dispatch(Wake(2))
    assert [restart.epoch for restart in driver.restarts] == [2]
    assert 2 not in driver.orders
    driver.restart_worker()
    assert driver.orders[2] == "done"
    driver.dispatch(Resume(3))
    driver.submit("c", range(9), max_tokens=3)
    driver.run()
    driver.assert_answered("c")
    assert driver.ended["c", 0].cached_tokens == 0, "the cache went with the worker"
    assert driver.instance.worker.losses == 0, "it is nobody's fault"
    driver.assert_at_rest()


def test_nothing_that_was_cached_before_the_sleep_is_found_after_it():
    """Also where the next pool has the incarnation of the one before: incarnations are drawn by whoever makes the pool."""
    driver = asleep()
    driver.dispatch(Wake(2))
    driver.worker = FakeWorker(driver.config.kv.block_size)
    driver.dispatch(WorkerReady(driver.instance.worker.epoch, driver.pool_incarnation))
    driver.dispatch(Resume(3))
    driver.submit("c", range(9), max_tokens=3)
    driver.run()
    driver.assert_answered("c")
    assert driver.ended["c", 0].cached_tokens == 0


def test_only_a_paused_instance_sleeps():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.dispatch(Sleep(1))
    driver.dispatch(Pause())
    driver.dispatch(Sleep(2))
    assert driver.orders == {1: "refused", 2: "refused"}
    driver.run()
    driver.assert_answered()
    assert driver.instance.worker.state is WorkerState.READY


def test_a_sleeping_instance_is_not_resumed():
    driver = asleep()
    driver.dispatch(Resume(5))
    assert driver.orders[5] == "refused"
    assert driver.instance.mode is Mode.PAUSED


def test_a_wake_waits_until_the_old_worker_has_ended():
    driver = Driver()
    driver.dispatch(Pause())
    driver.dispatch(Sleep(1))
    driver.dispatch(Wake(2))
    assert driver.orders == {}
    assert not driver.restarts
    driver.dispatch(WorkerStopped())
    assert driver.orders == {1: "done"}
    assert len(driver.restarts) == 1
    driver.dispatch(Sleep(3))
    assert driver.orders[3] == "refused", "one is being started"
    driver.restart_worker()
    assert driver.orders[2] == "done"


def test_repeats_are_harmless():
    driver = asleep()
    driver.dispatch(Sleep(2))
    driver.dispatch(WorkerStopped())
    driver.dispatch(Wake(3))
    driver.dispatch(Wake(4))
    assert len(driver.restarts) == 1
    driver.restart_worker()
    driver.dispatch(Wake(5))
    assert driver.orders == dict.fromkeys(range(1, 6), "done")


def test_the_end_of_the_worker_that_was_stopped_is_no_loss():
    driver = asleep()
    driver.dispatch(WorkerLost(WorkerEpoch(1)))
    assert driver.instance.stats.worker_losses == 0
    assert driver.instance.worker.state is WorkerState.ASLEEP


def test_a_worker_that_does_not_come_is_lost_like_any_other():
    driver = asleep()
    driver.dispatch(Wake(2))
    driver.lose_worker()
    assert [restart.epoch for restart in driver.restarts] == [2, 3]
    while driver.instance.worker.state is not WorkerState.GONE:
        driver.lose_worker()
    assert driver.orders[2] == "refused"


def test_orders_that_wait_are_bounded():
    driver = Driver(sleep_orders_max=3)
    driver.dispatch(Pause())
    for number in range(4):
        driver.dispatch(Sleep(number))
    assert driver.orders == {3: "refused"}
    assert len(driver.stopped) == 1
    assert not any(isinstance(effect, RestartWorker | StopWorker) for effect in driver.dispatch(WorkerStopped()))


def test_an_order_that_is_one_too_many_is_refused_in_words():
    """They were those of an instance that is not paused, and of a worker that cannot be started."""
    driver = Driver(sleep_orders_max=2)
    driver.dispatch(Pause())
    for number in range(2):
        driver.dispatch(Sleep(number))
    (refused,) = (effect for effect in driver.dispatch(Sleep(2)) if isinstance(effect, OrderAnswer))
    assert refused == OrderAnswer(2, "refused", "2 orders to sleep wait already")
    driver.dispatch(WorkerStopped())
    for number in range(3, 5):
        driver.dispatch(Wake(number))
    (refused,) = (effect for effect in driver.dispatch(Wake(5)) if isinstance(effect, OrderAnswer))
    assert refused == OrderAnswer(5, "refused", "2 orders to wake wait already")


def test_orders_do_not_wait_for_ever_for_a_worker_that_does_not_end():
    driver = Driver(worker_stop_seconds_max=5.0)
    driver.dispatch(Pause())
    driver.dispatch(Sleep(1))
    driver.dispatch(Wake(2))
    assert driver.instance.next_deadline() == 5.0
    driver.advance(5.0)
    assert driver.orders == {1: "refused", 2: "refused"}
    assert driver.instance.next_deadline() is None
    assert not driver.restarts, "the old worker may still hold the memory"
    driver.dispatch(Wake(3))
    driver.advance(1.0)
    driver.dispatch(WorkerStopped())
    assert driver.restarts, "it has ended after all"
    driver.restart_worker()
    assert driver.orders[3] == "done"


def test_a_worker_that_ends_in_time_disarms_the_deadline():
    driver = asleep()
    assert driver.instance.next_deadline() is None
    driver.advance(1000.0)
    assert driver.orders == {1: "done"}
