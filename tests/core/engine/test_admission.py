"""Who is let in: refusals with the numbers, the bounds of the queue, the reserve."""

import pytest

from baton.core.engine.phase import Phase
from baton.core.engine.worker_watch import WorkerState
from baton.core.events import Abort, Submit
from baton.protocol.ids import RequestId
from baton.protocol.request import Refused

from .harness import Driver, freeze, make_request, stop_at


def test_request_that_can_never_fit_is_refused_with_the_numbers():
    """15."""
    driver = Driver(blocks=8, block_size=4)
    driver.submit("a", range(20), max_tokens=14)  # 33 positions
    assert driver.refused["a"] == Refused("never_fits", needed=9, limit=8)
    assert "9 KV blocks" in str(driver.refused["a"])
    assert "8" in str(driver.refused["a"])
    driver.assert_at_rest()


def test_request_that_just_fits_is_taken_and_finishes():
    """15. The last token is sampled and never fed back: 20 + 13 tokens need room for 32."""
    driver = Driver(blocks=8, block_size=4)
    driver.submit("a", range(20), max_tokens=13)
    driver.submit("b", range(30, 50), max_tokens=13)
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_refused_request_leaves_no_trace():
    driver = Driver(blocks=8, block_size=4)
    driver.submit("a", range(5), max_tokens=8)
    driver.step()
    before = freeze(driver.instance.board), freeze(driver.instance.board.groups)
    refused = driver.instance.stats.refused["never_fits"]
    driver.submit("b", range(60), max_tokens=8, timeout_seconds=3.0)
    assert driver.instance.stats.refused["never_fits"] == refused + 1
    driver.instance.stats.refused["never_fits"] = refused  # that it happened is all that is kept
    assert (freeze(driver.instance.board), freeze(driver.instance.board.groups)) == before
    driver.run()
    driver.assert_answered("a")
    driver.assert_at_rest()


def test_queue_bound_in_requests():
    driver = Driver(slots=1, requests_max=2)
    for name in "abc":
        driver.submit(name, max_tokens=4)  # a is seated at once and does not wait
    driver.submit("d", max_tokens=4)
    assert driver.refused["d"] == Refused("queue_full", needed=3, limit=2)
    driver.run()
    driver.submit("d", max_tokens=4)
    driver.run()
    driver.assert_answered("a", "b", "c", "d")


def test_queue_bound_counts_every_one_of_the_n_sequences():
    driver = Driver(slots=1, requests_max=4)
    driver.submit("a", max_tokens=4)
    driver.submit("b", max_tokens=4, n=5)
    assert driver.refused["b"] == Refused("never_queued", needed=5, limit=4), "trying again later would not help"
    driver.submit("b", max_tokens=4, n=4)
    driver.submit("c", max_tokens=4)
    assert driver.refused["c"] == Refused("queue_full", needed=5, limit=4)
    driver.run()
    driver.assert_answered("a", "b")


def test_queue_bound_in_tokens():
    driver = Driver(slots=1, tokens_max=10)
    driver.submit("a", range(9), max_tokens=4)
    driver.submit("b", range(9), max_tokens=4)
    driver.submit("c", (1, 2), max_tokens=4)
    assert driver.refused["c"] == Refused("queue_tokens_full", needed=11, limit=10)
    driver.submit("d", (1,), max_tokens=4)
    driver.run()
    driver.assert_answered("a", "b", "d")


def test_preempted_one_keeps_its_place_and_does_not_count_as_queued():
    driver = Driver(slots=1, requests_max=1)
    driver.submit("a", max_tokens=9, priority=1)
    driver.step(2)
    driver.submit("urgent", (4, 5), max_tokens=9, priority=0)  # takes the slot; a waits
    driver.run_until("urgent", Phase.DECODE)
    assert driver.phase("a") is Phase.WAITING
    driver.submit("b", (6, 7), max_tokens=2, priority=1)
    assert not driver.refused
    driver.run()
    driver.assert_answered()


def test_duplicate_id_is_refused_while_the_first_lives():
    driver = Driver()
    driver.submit("a", max_tokens=4)
    driver.dispatch(Submit(make_request("a", (9, 9), max_tokens=1)))
    assert driver.refused["a"].reason == "duplicate_id"
    driver.run()
    driver.assert_answered()


def test_id_may_be_used_again_as_soon_as_the_client_has_its_end():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.step(3)
    driver.abort("a")
    old = driver.sequence("a")
    driver.submit("a", (7, 8), max_tokens=5)
    assert old.phase is Phase.CLOSING, "the old one is still on the worker"
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_requests_wait_for_the_worker():
    driver = Driver(start=False)
    driver.submit("a", max_tokens=4)
    assert not driver.plans
    driver.restart_worker()
    driver.run()
    driver.assert_answered()


# Blocks


def test_head_that_does_not_fit_holds_nothing_and_evicts_nothing():
    """26. It has a hit and a slot, and is short of blocks."""
    driver = Driver(blocks=8, block_size=4)
    driver.submit("cached", range(9), max_tokens=1)
    driver.run()
    driver.submit("big", range(30, 46), max_tokens=5)  # 4 blocks, later 5
    driver.step()
    driver.submit("head", [*range(9), *range(60, 78)], max_tokens=1)  # 7 blocks: 2 hits and 5 new
    driver.step()
    assert driver.phase("head") is Phase.WAITING
    assert driver.sequence("head").blocks == []
    assert driver.pool.idle == 2
    assert driver.instance.board.cache.evicted == 0
    assert driver.instance.stats.held_back["blocks"] > 0
    driver.run()
    driver.assert_answered()
    assert driver.ended["head", 0].cached_tokens == 8
    driver.assert_at_rest()


def test_nobody_overtakes_a_head_that_does_not_fit():
    driver = Driver(blocks=8, block_size=4)
    driver.submit("a", range(20), max_tokens=9)
    driver.step()
    driver.submit("big", range(30, 50), max_tokens=2)
    driver.submit("small", (1,), max_tokens=2)
    driver.run()
    assert driver.admissions == ["a", "big", "small"]
    driver.assert_answered()


def test_full_reserve_means_no_preemption_and_none_means_some():
    """14. The reserve is what admission leaves for the growth of those that run."""

    def preemptions(reserve: float) -> int:
        driver = Driver(blocks=12, block_size=4, slots=8, reserve_start=reserve)
        for number in range(8):
            driver.submit(f"r{number}", [number] * 4, max_tokens=20)
        driver.run()
        driver.assert_answered()
        return driver.instance.stats.preemptions

    assert preemptions(1.0) == 0
    assert preemptions(0.0) > 0


def test_reserve_learns_from_what_ended_sequences_used():
    driver = Driver(reserve_start=0.5, reserve_learning=0.25)
    reserve = driver.instance.board.reserve
    driver.submit("a", max_tokens=100, stop_token_ids=(stop_at(4),))
    driver.run()
    assert driver.reason("a") == "stop"
    assert reserve.ratio == pytest.approx(0.5 + (5 / 100 - 0.5) / 4)
    ratio = reserve.ratio
    driver.lose_worker()
    driver.submit("never admitted", max_tokens=100)
    driver.abort("never admitted")
    assert reserve.ratio == ratio


@pytest.mark.parametrize("end", ["abort", "timeout", "error"])
def test_reserve_learns_nothing_from_answers_that_were_cut_short(end):
    """A wave of clients that leave says nothing about the answers of those that stay."""
    driver = Driver(reserve_start=0.5, reserve_learning=0.5)
    for number in range(4):
        driver.submit(f"r{number}", [number, 1, 2], max_tokens=100, timeout_seconds=5.0 if end == "timeout" else None)
    driver.step(3)
    if end == "abort":
        for number in range(4):
            driver.dispatch(Abort(RequestId(f"r{number}")))
    elif end == "timeout":
        driver.advance(6.0)
    else:
        for _ in range(40):
            driver.lose_worker()
            if driver.instance.worker.state is WorkerState.GONE:
                break
            driver.restart_worker()
    assert len(driver.ended) == 4
    assert driver.instance.view.reserve_ratio == 0.5


def test_reserve_rises_when_growth_preempts_and_not_when_urgency_or_pressure_does():
    driver = Driver(blocks=6, block_size=4, slots=3, reserve_start=0.05, reserve_learning=0.0625)
    reserve = driver.instance.board.reserve
    driver.submit("lesser", [1, 2, 3], max_tokens=18, priority=1)
    driver.step(2)
    driver.preempt()
    driver.run_until("lesser", Phase.DECODE)
    driver.submit("urgent", range(10, 32), max_tokens=2)
    while driver.phase("urgent") is Phase.WAITING:
        driver.step()
    assert driver.sequence("lesser").preemptions == 2
    assert reserve.ratio == 0.05
    driver.run()
    ratio = reserve.ratio
    for name, token in zip("abc", (50, 60, 70), strict=True):
        driver.submit(name, [token] * 6, max_tokens=12)  # 2 blocks now, 5 at the end: they cannot all grow
    while driver.instance.stats.preemptions == 2:
        driver.step()
    assert reserve.ratio > ratio + (1 - ratio) * 0.4
    driver.run()
    driver.assert_answered()


def test_less_urgent_growth_is_not_reserved_for():
    """It can be preempted for it instead."""
    driver = Driver(blocks=8, block_size=4, reserve_start=1.0)
    driver.submit("lesser", [1, 2, 3], max_tokens=29, priority=1)  # may grow to 8 blocks
    driver.step()
    driver.submit("same", [4, 5, 6], max_tokens=2, priority=1)
    driver.step()
    assert driver.phase("same") is Phase.WAITING
    driver.submit("urgent", [7, 8, 9], max_tokens=2, priority=0)
    driver.step()
    assert driver.phase("urgent") is not Phase.WAITING
    driver.run()
    driver.assert_answered()
