"""A worker that is late, repeats itself, lies, or dies: results count once and in order, and nobody loses a token."""

import pytest
from msgspec.structs import replace

from baton.core.engine.phase import Phase
from baton.core.engine.worker_watch import HEALTHY_STEPS, WorkerState
from baton.core.events import StepDone, WorkerLost, WorkerReady
from baton.protocol.ids import PoolIncarnation, WorkerEpoch
from baton.protocol.output import Emit
from baton.protocol.request import Refused
from baton.protocol.step import PREEMPTED_TOKEN_ID, Row, RowFailure, StepResult

from .harness import Driver, freeze

POOL = PoolIncarnation(1)

# Results


def test_results_that_overtake_each_other_are_absorbed_in_order():
    driver = Driver(steps_in_flight=4)
    driver.submit("a", max_tokens=9)
    for _ in range(4):
        driver.execute()
    for place in (3, 1, 1):  # the last, then the second, then the third
        effects = driver.deliver(place)
        assert not any(isinstance(effect, Emit) for effect in effects)
    driver.deliver()
    assert len(driver.heard("a")) == 4
    driver.run()
    driver.assert_answered()
    assert driver.instance.stats.stale_results == 0


def test_late_repeated_and_reordered_results():
    """Every result twice, each pair the wrong way round, with preemptions between: the output is what it is."""
    driver = Driver(steps_in_flight=2, slots=2)
    driver.submit("a", range(6), max_tokens=12)
    driver.submit("b", (7, 8), max_tokens=12)
    driver.submit("c", (9, 8), max_tokens=12)
    for round_no in range(200):
        if not driver.plans:
            break
        pair = [driver.worker.run(driver.plans.popleft()) for _ in range(min(2, len(driver.plans)))]
        for result in [*reversed(pair), *pair]:
            driver.dispatch(StepDone(result))
        if round_no % 3 == 0:
            driver.preempt()
    driver.assert_answered()
    driver.assert_at_rest()
    assert driver.instance.stats.stale_results > 0


def test_repeated_result_changes_nothing():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    result = driver.execute()
    driver.deliver()
    before, stale = freeze(driver.instance.board.running), driver.instance.stats.stale_results
    assert driver.dispatch(StepDone(result)) == []
    assert freeze(driver.instance.board.running) == before
    assert driver.instance.stats.stale_results == stale + 1


@pytest.mark.parametrize("step", [-1, 0, 4, 999])
def test_result_of_a_step_that_is_not_in_flight_is_inert(step):
    driver = Driver()
    driver.submit("a", max_tokens=9)  # steps 1 and 2 are in flight
    assert driver.dispatch(StepDone(StepResult.of(step, driver.instance.worker.epoch, [(0, 1, (50,))]))) == []
    driver.run()
    driver.assert_answered()
    assert driver.instance.stats.stale_results == 1


def test_result_of_old_epoch_is_inert():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.step(2)
    late = driver.execute()
    driver.lose_worker()
    assert driver.dispatch(StepDone(late)) == []
    driver.restart_worker()
    assert driver.dispatch(StepDone(late)) == []
    assert driver.instance.stats.stale_results == 2
    driver.run()
    driver.assert_answered()


def test_result_that_names_an_awaited_step_of_another_epoch_is_inert():
    driver = Driver()
    driver.lose_worker()
    driver.restart_worker()
    driver.submit("a", max_tokens=9)
    result = driver.execute()
    for epoch in (1, 3):
        assert driver.dispatch(StepDone(replace(result, epoch=WorkerEpoch(epoch), values=(50,)))) == []
    driver.run()
    driver.assert_answered()


def test_second_copy_of_a_result_that_waits_for_an_older_one_is_stale():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.execute()
    younger = driver.execute()
    driver.deliver(1)
    driver.dispatch(StepDone(replace(younger, values=(50,))))
    assert driver.instance.stats.stale_results == 1
    driver.run()
    driver.assert_answered()


def with_row(result: StepResult, slot: int, incarnation: int, *values: int) -> StepResult:
    return of_rows(result, [*result.rows, (slot, incarnation, values)])


def of_rows(result: StepResult, rows: list[Row]) -> StepResult:
    return StepResult.of(result.step, result.epoch, rows, result.failures, result.logprobs)


@pytest.mark.parametrize("values", [(77,), (), (77, 78), (PREEMPTED_TOKEN_ID,)])
def test_late_row_of_an_earlier_occupant_is_inert(values):
    driver = Driver(slots=1)
    driver.submit("a", max_tokens=2)
    driver.submit("b", (7, 8), max_tokens=9)
    driver.run_until("b", Phase.DECODE)
    gone, present = driver.seated
    assert (gone.slot, present.slot) == (0, 0)
    result = with_row(driver.execute(), gone.slot, gone.incarnation, *values)
    driver.results.clear()
    driver.dispatch(StepDone(result))
    assert driver.instance.stats.stale_rows == 1
    assert not driver.restarts
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_late_row_of_an_occupant_that_is_gone_is_inert_while_its_slot_is_free():
    driver = Driver(slots=2)
    driver.submit("a", max_tokens=2)
    driver.submit("b", (7, 8), max_tokens=20)
    while driver.phase("a") is not Phase.DONE:
        driver.step()
    gone = driver.seated[0]
    result = with_row(driver.execute(), gone.slot, gone.incarnation, 77)
    driver.results.clear()
    driver.dispatch(StepDone(result))
    assert not driver.restarts


def with_late_failure(beside_a_chunk: bool) -> tuple[Driver, StepResult]:
    """b sits where a sat; the worker reports a failure of a, who is gone, with b's next row."""
    driver = Driver(slots=2, chunk_tokens_max=2)
    driver.submit("a", (1, 2), max_tokens=2)
    driver.run()
    driver.submit("b", (7, 8), max_tokens=9)
    driver.run_until("b", Phase.DECODE)
    if beside_a_chunk:
        driver.submit("c", range(20, 40), max_tokens=2)
        driver.step(2)
    gone, present = driver.seated[:2]
    assert gone.slot == present.slot
    result = replace(driver.execute(), failures=(RowFailure(gone.slot, gone.incarnation, "late"),))
    driver.results.clear()
    return driver, result


@pytest.mark.parametrize("beside_a_chunk", [False, True])
def test_late_failure_of_an_earlier_occupant_is_inert(beside_a_chunk):
    driver, result = with_late_failure(beside_a_chunk)
    driver.dispatch(StepDone(result))
    assert not driver.restarts
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_late_failure_of_an_earlier_occupant_excuses_no_missing_token():
    driver, result = with_late_failure(beside_a_chunk=False)
    driver.dispatch(StepDone(replace(result, lengths=(0,), values=())))
    assert driver.restarts


def test_late_row_of_a_slot_that_does_not_exist_is_inert():
    driver = Driver(slots=2)
    driver.submit("a", max_tokens=5)
    result = with_row(with_row(driver.execute(), 99, 1, 77), -1, 1, 77)
    driver.results.clear()
    driver.dispatch(StepDone(result))
    driver.run()
    driver.assert_answered()


# Results that are not of the protocol


def broken(kind: str, result: StepResult) -> StepResult:
    first, *rest = result.values
    match kind:
        case "a row is missing":
            return of_rows(result, result.rows[1:])
        case "no rows":
            return of_rows(result, [])
        case "one row twice":
            return with_row(result, result.slots[0], result.incarnations[0], first)
        case "one row twice and another missing":
            return replace(result, slots=(result.slots[0],) * 2, incarnations=(result.incarnations[0],) * 2)
        case "columns differ":
            return replace(result, lengths=(1,), values=(first,))
        case "a length too large":
            return replace(result, lengths=(2, 1))
        case "a negative length":
            return replace(result, lengths=(3, -1))
        case "more tokens than were asked for":
            return of_rows(result, [(*result.rows[0][:2], (first, first)), *result.rows[1:]])
        case "a negative value without meaning":
            return replace(result, values=(-2, *rest))
        case "another incarnation":
            return replace(result, incarnations=(result.incarnations[0] + 1, *result.incarnations[1:]))
        case "another slot":
            return replace(result, slots=(result.slots[0] + 2, *result.slots[1:]))
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "a row is missing",
        "no rows",
        "one row twice",
        "one row twice and another missing",
        "columns differ",
        "a length too large",
        "a negative length",
        "more tokens than were asked for",
        "a negative value without meaning",
        "another incarnation",
        "another slot",
    ],
)
def test_bad_result_restarts_the_worker(kind):
    """Its state is not what we think it is. The requests go on with what they had."""
    driver = Driver(slots=4)
    driver.submit("a", max_tokens=9)
    driver.submit("b", (7, 8), max_tokens=9)
    driver.step(3)
    heard = list(driver.heard("a"))
    result = broken(kind, driver.execute())
    driver.dispatch(StepDone(result))
    assert [restart.epoch for restart in driver.restarts] == [2]
    assert f"step {result.step}" in driver.restarts[0].reason
    assert driver.heard("a") == heard, "nothing of it was absorbed"
    driver.restart_worker()
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_token_beyond_int32_restarts_the_worker():
    driver = Driver(block_size=4)
    driver.submit("a", max_tokens=9)
    result = driver.execute()
    driver.dispatch(StepDone(replace(result, values=(2**32,))))
    assert driver.restarts


def test_acknowledgement_of_a_drop_that_was_not_told_restarts_the_worker():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.step(3)
    result = driver.execute()
    driver.dispatch(StepDone(replace(result, values=(PREEMPTED_TOKEN_ID,))))
    assert driver.restarts


def test_token_in_place_of_an_acknowledgement_restarts_the_worker():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.step(3)
    driver.abort("a")
    driver.step(2)
    result = driver.execute()
    assert result.values == (PREEMPTED_TOKEN_ID,)
    driver.dispatch(StepDone(replace(result, values=(5,))))
    assert driver.restarts


def test_no_token_where_one_is_due_restarts_the_worker():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.step(3)
    result = driver.execute()
    driver.dispatch(StepDone(replace(result, lengths=(0,), values=())))
    assert driver.restarts


def test_token_in_the_middle_of_a_prompt_restarts_the_worker():
    driver = Driver(chunk_tokens_max=2)
    driver.submit("a", range(9), max_tokens=9)
    result = driver.execute()
    assert (result.lengths, result.values) == ((0,), ())
    driver.dispatch(StepDone(replace(result, lengths=(1,), values=(5,))))
    assert driver.restarts


# Losing it


@pytest.mark.parametrize("pool_kept", [False, True])
def test_worker_lost_requeues_with_tokens(pool_kept):
    """Prompt and every output received are prefilled again; what was cached counts only if the pool was kept."""
    driver = Driver(block_size=4)
    driver.submit("a", range(8), max_tokens=12)
    driver.step(5)
    heard = list(driver.heard("a"))
    driver.execute()  # computed, and lost with the worker
    driver.lose_worker()
    assert driver.phase("a") is Phase.WAITING
    assert len(driver.restarts) == 1
    assert not driver.plans
    driver.restart_worker(pool_kept=pool_kept)
    again = driver.seated[-1]
    assert list(again.tokens) == [*range(8), *heard]
    assert again.computed_tokens == (12 if pool_kept else 0)
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()
    assert driver.ended["a", 0].preemptions == 0


def test_order_is_kept_when_the_worker_is_lost():
    driver = Driver(slots=2)
    for name, token in zip("abcd", (10, 20, 30, 40), strict=True):
        driver.submit(name, [token, 1], max_tokens=5)
    driver.step(3)
    driver.preempt()
    driver.lose_worker("killed")
    driver.restart_worker()
    driver.run()
    assert driver.admissions == ["a", "b", "a", "b", "c", "d"]
    driver.assert_answered()


def test_loss_of_an_earlier_worker_is_no_loss():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.lose_worker()
    driver.restart_worker()
    before = freeze(driver.instance)
    assert driver.dispatch(WorkerLost(WorkerEpoch(1))) == []
    assert driver.dispatch(WorkerReady(WorkerEpoch(1), POOL)) == []
    assert driver.dispatch(WorkerReady(WorkerEpoch(2), POOL)) == [], "it is ready already"
    assert freeze(driver.instance) == before
    driver.run()
    driver.assert_answered()


def test_step_watchdog():
    driver = Driver(step_seconds_max=10.0, worker_start_seconds_max=100.0)
    assert driver.instance.next_deadline() is None, "an idle worker owes nothing"
    driver.submit("a", max_tokens=9)
    assert driver.instance.next_deadline() == 10.0
    driver.advance(seconds=8.0)
    driver.step()
    assert driver.instance.next_deadline() == 18.0, "the next plan could not begin before"
    driver.advance(seconds=9.5)
    assert not driver.restarts
    driver.advance(seconds=0.5)
    assert [restart.reason for restart in driver.restarts] == ["no result of a step in time"]
    assert driver.instance.next_deadline() == 118.0
    driver.restart_worker()
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_result_in_the_last_moment_counts():
    driver = Driver(step_seconds_max=10.0)
    driver.submit("a", max_tokens=9)
    driver.execute()
    driver.now = 10.0
    driver.deliver()
    assert not driver.restarts
    assert len(driver.heard("a")) == 1


def test_after_a_pause_of_the_engine_other_news_do_not_cost_a_worker_that_has_answered():
    """Its answer is here, unread, behind a request: only a Tick, which comes after all news, may find it overdue."""
    driver = Driver(step_seconds_max=10.0)
    driver.submit("a", max_tokens=9)
    driver.execute()
    driver.now = 60.0
    driver.submit("b", (7, 8), max_tokens=1)
    assert not driver.restarts
    driver.deliver()
    driver.advance(seconds=0.0)
    assert not driver.restarts
    driver.run()
    driver.assert_answered()


def test_younger_result_does_not_feed_the_watchdog():
    driver = Driver(step_seconds_max=10.0)
    driver.submit("a", max_tokens=9)
    driver.execute()
    driver.execute()
    driver.now = 9.0
    driver.deliver(1)
    driver.advance(seconds=1.0)
    assert len(driver.restarts) == 1, "the oldest plan never got its result"


def test_new_plan_does_not_feed_the_watchdog():
    driver = Driver(step_seconds_max=10.0)
    driver.submit("a", max_tokens=1)
    driver.now = 6.0
    driver.submit("b", (7, 8), max_tokens=1)
    assert len(driver.plans) == 2
    assert driver.instance.next_deadline() == 10.0


def test_worker_that_does_not_start_in_time_is_lost():
    driver = Driver(worker_start_seconds_max=20.0)
    driver.lose_worker()
    driver.advance(seconds=20.0)
    assert [restart.epoch for restart in driver.restarts] == [2, 3]
    assert driver.restarts[1].reason == "not ready in time"
    driver.dispatch(WorkerReady(WorkerEpoch(2), POOL))  # the one that was given up
    driver.submit("a", max_tokens=3)
    assert not driver.plans
    driver.restart_worker()
    driver.run()
    driver.assert_answered()


def test_worker_gone():
    """After too many losses in a row everybody is told, new ones are refused with the numbers, and nothing is armed."""
    driver = Driver(worker_restarts_max=2)
    driver.submit("running", max_tokens=9)
    driver.submit("many", (7, 8), max_tokens=9, n=3)
    driver.step(2)
    for _ in range(3):
        driver.lose_worker()
    assert len(driver.restarts) == 2
    assert driver.instance.worker.state is WorkerState.GONE
    assert {driver.reason("running"), *(driver.reason("many", index) for index in range(3))} == {"error"}
    driver.submit("new", max_tokens=1)
    assert driver.refused["new"] == Refused("worker_gone", needed=3, limit=2)
    driver.assert_at_rest()

    driver.restart_worker()  # somebody has mended it
    driver.submit("new", max_tokens=3)
    driver.run()
    driver.assert_answered("new")


def test_losses_count_only_in_a_row():
    driver = Driver(worker_restarts_max=1)
    driver.submit("a", max_tokens=100)
    for _ in range(5):
        driver.step(HEALTHY_STEPS)
        driver.lose_worker()
        driver.restart_worker()
    driver.run()
    driver.assert_answered()
