"""Abort, timeout, pause: every way to end early, in every phase."""

import pytest

from baton.core.effects import Mode
from baton.core.engine.phase import Phase
from baton.core.events import Abort, Pause, Resume, Tick, WorkerProgressed, WorkerSilent
from baton.protocol.ids import RequestId, WorkerEpoch
from baton.protocol.request import FinishReason

from .harness import Driver, freeze

PLACES = {
    "waiting for the worker": Phase.WAITING,
    "waiting": Phase.WAITING,
    "held": Phase.HELD,
    "prefill": Phase.PREFILL,
    "decode": Phase.DECODE,
    "preempting": Phase.PREEMPTING,
    "preempting, drop told": Phase.PREEMPTING,
    "preempted and waiting": Phase.WAITING,
    "closing": Phase.CLOSING,
}


def bring_to(place: str, **given: float) -> Driver:
    """A driver whose request "a" has a sequence in that place, beside a neighbour "b". The prompt of a is four chunks."""
    slots = 1 if place in ("waiting", "preempted and waiting") else 3
    driver = Driver(slots=slots, chunk_tokens_max=3, start=place != "waiting for the worker")

    def submit(name: str, **more: int) -> None:
        prompt = range(11) if name == "a" else (40, 41)
        driver.submit(name, prompt, max_tokens=12, **more, **(given if name == "a" else {}))

    match place:
        case "waiting for the worker":
            submit("a")
            submit("b")
        case "waiting":
            submit("b")
            submit("a")
        case "held":
            submit("a", n=2)
            submit("b")
        case "prefill":
            submit("a")
            submit("b")
            driver.step()
        case "decode" | "closing" | "preempting" | "preempting, drop told" | "preempted and waiting":
            submit("a", priority=5)
            driver.step(6)
            submit("b")
            if place == "preempted and waiting":
                driver.run_until("b", Phase.DECODE)
            if place == "closing":
                driver.abort("a")
            if place.startswith("preempting"):
                driver.preempt()  # a is less urgent
            if place == "preempting, drop told":
                driver.step()
                assert driver.plans[-1].drops
    assert driver.sequences["a"][-1].phase is PLACES[place]
    return driver


@pytest.mark.parametrize("place", PLACES)
def test_abort_in_each_phase(place):
    """19. Frees everything, ends it once with what it has, does not touch the neighbour."""
    driver = bring_to(place)
    heard = list(driver.heard("a"))
    driver.abort("a")
    assert driver.reason("a") == "abort"
    assert driver.heard("a") == heard
    assert all(sequence.phase in (Phase.CLOSING, Phase.DONE) for sequence in driver.sequences["a"])
    assert all(not sequence.blocks for sequence in driver.sequences["a"])
    if place == "waiting for the worker":
        driver.restart_worker()
    driver.run()
    assert driver.heard("a") == heard
    assert all(sequence.phase is Phase.DONE for sequence in driver.sequences["a"])
    driver.assert_answered("b")
    driver.assert_at_rest()


@pytest.mark.parametrize("place", PLACES)
def test_timeout_in_each_phase(place):
    driver = bring_to(place, timeout_seconds=30.0)
    if place == "closing":
        assert driver.reason("a") == "abort"
    else:
        assert driver.instance.next_deadline() == 30.0
        driver.advance(seconds=29.5)
        assert driver.reason("a") is None
        driver.advance(seconds=0.5)
        assert driver.reason("a") == "timeout"
    if place == "waiting for the worker":
        driver.restart_worker()
    driver.run()
    driver.assert_answered("b")
    driver.assert_at_rest()


@pytest.mark.parametrize("place", PLACES)
def test_drain_deadline_in_each_phase(place):
    """21. What is not finished by then is ended with what it has; then paused; then resumed."""
    driver = bring_to(place)
    driver.dispatch(Pause(drain_seconds_max=5.0))
    driver.advance(seconds=5.0)
    assert driver.reason("a") == driver.reason("b") == "abort"
    driver.run()
    driver.assert_at_rest()
    assert driver.modes == [Mode.DRAINING, Mode.PAUSED]
    driver.dispatch(Resume())
    if place == "waiting for the worker":
        driver.restart_worker()
    driver.submit("again", range(11), max_tokens=5)
    driver.run()
    driver.assert_answered("again")


@pytest.mark.parametrize("place", PLACES)
def test_drain_without_a_deadline_finishes_everything_in_each_phase(place):
    """21."""
    driver = bring_to(place)
    driver.dispatch(Pause())
    driver.submit("late", max_tokens=1)
    assert driver.refused["late"].reason == "draining"
    if place == "waiting for the worker":
        driver.restart_worker()
    driver.run()
    driver.assert_answered("b", *([] if place == "closing" else ["a"]))
    driver.assert_at_rest()
    assert driver.modes == [Mode.DRAINING, Mode.PAUSED]


@pytest.mark.parametrize("place", PLACES)
def test_loss_of_the_worker_in_each_phase(place):
    driver = bring_to(place)
    driver.lose_worker()
    driver.restart_worker()
    driver.run()
    driver.assert_answered("b", *([] if place == "closing" else ["a"]))
    driver.assert_at_rest()


@pytest.mark.parametrize("target", ["nobody", "ended", "closing"])
def test_abort_of_unknown_or_ended_leaves_nothing(target):
    """20. Not one field of the whole machine changes."""
    driver = Driver()
    driver.submit("ended", max_tokens=3)
    driver.run()
    driver.submit("running", (7, 8), max_tokens=9)
    driver.submit("closing", (8, 8), max_tokens=9)
    driver.step(2)
    driver.abort("closing")
    before = freeze(driver.instance)
    for index in (None, 0, 1, 99, -1):
        assert driver.dispatch(Abort(RequestId(target), index)) == []
    assert freeze(driver.instance) == before
    driver.run()
    driver.assert_answered("ended", "running")
    driver.assert_at_rest()


def test_abort_of_one_sequence_leaves_its_siblings():
    driver = Driver()
    driver.submit("a", range(6), max_tokens=8, n=3)
    driver.step(4)
    driver.abort("a", index=1)
    driver.abort("a", index=7)
    driver.run()
    assert [driver.reason("a", index) for index in range(3)] == ["length", "abort", "length"]
    assert [len(driver.heard("a", index)) for index in (0, 2)] == [8, 8]
    driver.assert_at_rest()


def test_abort_of_the_leader_lets_its_siblings_in():
    driver = Driver(chunk_tokens_max=2)
    driver.submit("a", range(6), max_tokens=8, n=3)
    driver.step()
    assert driver.phase("a", 1) is Phase.HELD
    driver.abort("a", index=0)
    driver.run()
    assert [driver.reason("a", index) for index in range(3)] == ["abort", "length", "length"]
    driver.assert_at_rest()


def test_front_may_end_a_sequence_as_stopped():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.step(3)
    driver.dispatch(Abort(RequestId("a"), 0, FinishReason.STOP))
    assert driver.reason("a") == "stop"
    driver.run()
    driver.assert_at_rest()


def test_abort_in_the_same_tick_as_the_end_is_nothing():
    driver = Driver()
    driver.submit("a", max_tokens=3)
    driver.step(3)
    assert driver.reason("a") == "length"
    assert driver.abort("a") == []
    driver.run()
    driver.assert_at_rest()


# Time


def test_timeout_ends_all_sequences_with_what_they_have():
    driver = Driver()
    driver.submit("a", range(6), max_tokens=30, n=2, timeout_seconds=10.0)
    driver.step(6)
    heard = [len(driver.heard("a", index)) for index in range(2)]
    assert min(heard) > 0
    driver.advance(seconds=10.0)
    assert [driver.reason("a", index) for index in range(2)] == ["timeout", "timeout"]
    assert [driver.ended["a", index].output_tokens for index in range(2)] == heard
    driver.run()
    driver.assert_at_rest()


def test_token_that_arrives_with_the_deadline_is_delivered():
    driver = Driver()
    driver.submit("a", max_tokens=30, timeout_seconds=10.0)
    driver.step(2)
    driver.execute()
    driver.now = 10.0
    driver.deliver()
    assert len(driver.heard("a")) == 3
    assert driver.reason("a") == "timeout"
    driver.run()
    driver.assert_at_rest()


def test_deadline_of_a_finished_request_is_forgotten():
    driver = Driver()
    driver.submit("a", max_tokens=2, timeout_seconds=10.0)
    driver.run()
    assert driver.instance.next_deadline() is None


def test_reused_id_has_a_deadline_of_its_own():
    driver = Driver()
    driver.submit("sooner", (7, 8), max_tokens=60, timeout_seconds=5.0)
    driver.submit("a", max_tokens=60, timeout_seconds=10.0)
    driver.abort("a")
    driver.now = 4.0
    driver.submit("a", (5, 6), max_tokens=60, timeout_seconds=10.0)
    driver.advance(seconds=6.0)
    assert driver.reason("sooner") == "timeout"
    assert driver.reason("a") is None, "the first one's deadline has passed"
    driver.advance(seconds=4.0)
    assert driver.reason("a") == "timeout"
    driver.run()
    driver.assert_at_rest()


def test_deadlines_of_ended_requests_do_not_pile_up():
    """Invariant 49: the size of every map has a bound. Here one request lives, 150 have come and gone."""
    driver = Driver(blocks=256, step_seconds_max=1e6)
    driver.submit("long", max_tokens=900, timeout_seconds=100.0)
    for number in range(150):
        driver.submit(f"short {number}", (4, 5), max_tokens=1, timeout_seconds=200.0)
        while not driver.reason(f"short {number}"):
            driver.step()
    assert driver.reason("long") is None
    assert len(driver.instance._intake._deadlines) < 100


def test_progress_of_a_step_puts_its_deadline_off_but_not_for_ever():
    driver = Driver(step_seconds_max=10.0)
    driver.submit("a", max_tokens=8)
    assert driver.instance.next_deadline() == 10.0
    epoch = driver.instance.worker.epoch
    driver.advance(seconds=9.0)
    driver.dispatch(WorkerProgressed(WorkerEpoch(epoch + 1)))
    assert driver.instance.next_deadline() == 10.0, "that of another life says nothing"
    for _ in range(40):
        driver.dispatch(WorkerProgressed(epoch))
        driver.advance(seconds=9.0)
        if driver.instance.worker.epoch != epoch:
            break
    assert driver.instance.worker.epoch == epoch + 1, "after twenty times as long it is lost all the same"
    assert 190.0 < driver.now <= 210.0


def test_an_idle_worker_that_is_silent_for_too_long_is_replaced():
    """No step has a deadline then: with a fault no router sends work, so none would ever begin."""
    driver = Driver(step_seconds_max=10.0)
    epoch = driver.instance.worker.epoch
    driver.dispatch(WorkerSilent(WorkerEpoch(epoch + 1)))
    assert driver.instance.worker.epoch == epoch, "that of another life says nothing"
    driver.dispatch(WorkerSilent(epoch))
    assert driver.instance.worker.epoch == epoch + 1
    assert driver.instance.stats.worker_losses == 1


def test_a_worker_with_a_plan_has_the_deadline_of_its_step_alone():
    driver = Driver(step_seconds_max=10.0)
    driver.submit("a", max_tokens=8)
    epoch = driver.instance.worker.epoch
    driver.dispatch(WorkerSilent(epoch))
    assert driver.instance.worker.epoch == epoch


def test_clock_backwards():
    """Nothing un-happens: the latest time seen is the time."""
    driver = Driver(step_seconds_max=50.0)
    driver.now = 100.0
    driver.submit("a", max_tokens=8, timeout_seconds=30.0)
    driver.now = 20.0
    driver.submit("b", (5, 6), max_tokens=8, timeout_seconds=20.0)
    assert driver.instance.next_deadline() == 120.0
    driver.dispatch(Tick())
    driver.step(4)
    assert driver.reason("a") is driver.reason("b") is None
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_next_deadline_is_a_pure_question():
    driver = Driver()
    driver.submit("a", max_tokens=30, timeout_seconds=25.0)
    driver.submit("over", (7, 8), max_tokens=1, timeout_seconds=40.0)
    driver.step(4)
    driver.dispatch(Pause(drain_seconds_max=20.0))
    before = freeze(driver.instance)
    assert [driver.instance.next_deadline() for _ in range(3)] == [20.0, 20.0, 20.0]
    driver.instance.check()
    assert freeze(driver.instance) == before


def test_every_deadline_is_met_by_a_tick_at_that_very_time():
    """What next_deadline names has happened after a Tick then; it never names the same time again."""
    driver = Driver(step_seconds_max=7.0, worker_start_seconds_max=11.0, worker_restarts_max=3)
    for number, seconds in enumerate((5.0, 9.0, 13.0)):
        driver.submit(f"r{number}", (number, 1), max_tokens=50, timeout_seconds=seconds)
    seen = []
    while (deadline := driver.instance.next_deadline()) is not None:
        assert deadline > driver.now
        driver.now = deadline
        driver.dispatch(Tick())
        seen.append(deadline)
    assert seen == sorted(set(seen))
    assert all(driver.ended.values())


# Pause


def test_pause_drain_resume():
    """21. Reject, drain, stop, in this order; then take requests again."""
    driver = Driver(slots=1)
    driver.submit("a", max_tokens=9)
    driver.submit("b", (4, 5), max_tokens=9)
    driver.step(2)
    driver.dispatch(Pause())
    driver.submit("c", max_tokens=1)
    assert driver.refused["c"].reason == "draining"
    driver.run()
    driver.assert_answered("a", "b")
    driver.assert_at_rest()
    driver.submit("c", max_tokens=1)
    assert driver.refused["c"].reason == "paused"
    assert not driver.plans
    driver.dispatch(Resume())
    driver.submit("c", max_tokens=1)
    driver.run()
    driver.assert_answered("c")
    assert driver.modes == [Mode.DRAINING, Mode.PAUSED, Mode.SERVING]


def test_pause_of_an_idle_instance_is_immediate():
    driver = Driver()
    driver.dispatch(Pause(drain_seconds_max=5.0))
    assert driver.modes == [Mode.DRAINING, Mode.PAUSED]
    assert driver.instance.next_deadline() is None


def test_not_paused_before_the_last_drop_is_acknowledged():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.step(2)
    driver.dispatch(Pause())
    driver.abort("a")
    while driver.plans:
        assert driver.modes == [Mode.DRAINING]
        driver.step()
    assert driver.modes == [Mode.DRAINING, Mode.PAUSED]
    driver.assert_at_rest()


def test_drain_with_preemptions_and_aborts_in_flight_comes_to_an_end():
    driver = Driver(slots=3)
    for name, token in zip("abcd", (10, 20, 30, 40), strict=True):
        driver.submit(name, [token, 1], max_tokens=8)
    driver.step(3)
    driver.preempt(2)
    driver.dispatch(Pause(drain_seconds_max=100.0))
    driver.abort("b")
    driver.step()
    driver.preempt(1)
    driver.run()
    driver.assert_answered("a", "c", "d")
    driver.assert_at_rest()
    assert driver.modes == [Mode.DRAINING, Mode.PAUSED]


def test_second_pause_may_set_a_deadline_and_repeats_are_harmless():
    driver = Driver()
    driver.submit("a", max_tokens=60)
    driver.dispatch(Pause())
    driver.dispatch(Pause(drain_seconds_max=2.0))
    driver.dispatch(Pause())
    driver.advance(seconds=2.0)
    assert driver.reason("a") == "abort"
    driver.run()
    driver.dispatch(Pause(drain_seconds_max=2.0))
    assert driver.modes == [Mode.DRAINING, Mode.PAUSED]
    driver.assert_at_rest()


def test_resume_while_draining_forgets_the_deadline():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.dispatch(Pause(drain_seconds_max=2.0))
    driver.dispatch(Resume())
    driver.dispatch(Resume())
    driver.advance(seconds=5.0)
    driver.submit("b", (4, 5), max_tokens=9)
    driver.run()
    driver.assert_answered()
    assert driver.modes == [Mode.DRAINING, Mode.SERVING]


def test_worker_lost_while_draining_does_not_lose_the_requests():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.step(3)
    driver.dispatch(Pause())
    driver.lose_worker()
    assert driver.modes == [Mode.DRAINING]
    driver.restart_worker()
    driver.run()
    driver.assert_answered()
    assert driver.modes == [Mode.DRAINING, Mode.PAUSED]


# Orders: whoever gives one gets the answer to that number


def test_a_pause_is_answered_when_it_is_done():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.dispatch(Pause(number=1))
    driver.step()
    driver.dispatch(Pause(number=2))
    assert driver.orders == {}
    driver.run()
    assert driver.modes[-1] is Mode.PAUSED
    assert driver.orders == {1: "done", 2: "done"}
    driver.dispatch(Pause(number=3))
    assert driver.orders[3] == "done", "it is paused already"


def test_a_pause_that_is_resumed_first_is_overtaken():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.dispatch(Pause(number=1))
    driver.dispatch(Resume(number=2))
    assert driver.orders == {1: "overtaken", 2: "done"}
    driver.dispatch(Pause(number=3))
    driver.run()
    assert driver.orders == {1: "overtaken", 2: "done", 3: "done"}
    driver.dispatch(Resume(number=4))
    driver.dispatch(Resume(number=5))
    assert driver.orders[4] == driver.orders[5] == "done"


def test_orders_that_wait_are_bounded():
    driver = Driver(pauses_max=3)
    driver.submit("a", max_tokens=9)
    for number in range(4):
        driver.dispatch(Pause(number=number))
    assert driver.orders == {3: "refused"}
    driver.run()
    assert driver.orders == {3: "refused", 0: "done", 1: "done", 2: "done"}


def test_an_order_without_a_number_has_no_answer():
    driver = Driver()
    driver.dispatch(Pause())
    driver.dispatch(Resume())
    assert driver.orders == {}
