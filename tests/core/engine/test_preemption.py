"""Preemption: acknowledged before anything else, invisible to the client, fair."""

import pytest

from baton.core.engine.phase import Phase
from baton.runtime.engine.snapshot import beat_of

from .harness import Driver, stop_at

# The acknowledgement


def test_preempted_request_waits_for_the_acknowledgement():
    """7. Out of `running`, not yet in line, slot still taken; seated again only after the drop's own result."""
    driver = Driver()
    driver.submit("a", max_tokens=12)
    driver.step(3)
    driver.preempt()
    for _ in range(3):  # two results that were in flight, then the drop's
        assert driver.phase("a") is Phase.PREEMPTING
        assert len(driver.instance.board.waiting) == 0
        assert driver.instance.board.slots.taken == 1
        assert len(driver.seated) == 1
        driver.step()
    assert driver.phase("a") is not Phase.PREEMPTING
    assert len(driver.seated) == 2
    driver.run()
    driver.assert_answered()
    assert driver.ended["a", 0].preemptions == 1


def test_tokens_in_flight_at_preemption_are_delivered_and_prefilled():
    driver = Driver(steps_in_flight=3)
    driver.submit("a", max_tokens=12)
    driver.step(2)
    driver.preempt()
    assert len(driver.heard("a")) == 2
    driver.run_until("a", Phase.DECODE)
    assert len(driver.heard("a")) == 2 + 3
    seated = driver.seated[-1]
    assert list(seated.tokens) == [1, 2, 3, *driver.heard("a")], "what to prefill is frozen: prompt and every output received"
    assert seated.prompt_tokens == 3
    driver.run()
    driver.assert_answered()


def test_holding_the_results_back_changes_nothing():
    """7. Whatever the delay, the drop is told once, nothing is seated, and the output is the same."""
    driver = Driver(steps_in_flight=4)
    driver.submit("a", max_tokens=12)
    driver.step(2)
    driver.preempt()
    while driver.plans:
        driver.execute()
    for _ in range(50):
        driver.advance(seconds=1)
    assert driver.phase("a") is Phase.PREEMPTING
    driver.run()
    driver.assert_answered()


@pytest.mark.parametrize("way", ["preempt", "abort"])
def test_empty_batch_still_acknowledges(way):
    """9. All slots are dropped at once: a plan with nothing to run goes out and answers for all of them."""
    driver = Driver(slots=3, steps_in_flight=1)
    for name, first in zip("abc", (10, 20, 30), strict=True):
        driver.submit(name, (first, first + 1), max_tokens=8)
    driver.step(3)
    if way == "preempt":
        driver.preempt(3)
    else:
        for name in "abc":
            driver.abort(name)
    driver.step()
    plan = driver.plans[-1]
    assert plan.run.slots == ()
    assert len(plan.drops) == 3
    driver.step()  # one iteration later every slot is free, or taken by its next occupant
    assert not any(driver.phase(name) in (Phase.PREEMPTING, Phase.CLOSING) for name in "abc")
    driver.run()
    if way == "preempt":
        driver.assert_answered()
    driver.assert_at_rest()


@pytest.mark.parametrize("end", ["stop", "length"])
def test_stop_token_in_flight_at_preemption_finishes_once(end):
    """10. The harness asserts one end and the block laws after every event."""
    driver = Driver()
    given = {"max_tokens": 20, "stop_token_ids": (stop_at(4),)} if end == "stop" else {"max_tokens": 5}
    driver.submit("a", **given)
    driver.step(4)
    driver.execute()
    driver.preempt()
    driver.deliver()  # the last token of all
    assert driver.reason("a") == end
    assert driver.phase("a") is Phase.CLOSING
    assert driver.pool.free + driver.pool.idle == driver.pool.total
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()
    assert sum(len(plan.drops) for plan in driver.history) == 1, "the drop that was told serves for both"


def test_preempting_twice_before_a_plan_tells_each_drop_once():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.submit("b", (4, 5), max_tokens=9)
    driver.step(2)
    driver.preempt()
    driver.preempt()
    driver.preempt()  # nobody is left: nothing happens
    driver.run()
    driver.assert_answered()
    assert sum(len(plan.drops) for plan in driver.history) == 4
    assert driver.instance.stats.preemptions == 2


def test_preemption_in_the_middle_of_a_chunked_prefill():
    driver = Driver(chunk_tokens_max=3)
    driver.submit("a", range(11), max_tokens=5)
    driver.step()
    assert driver.phase("a") is Phase.PREFILL
    driver.preempt()
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_every_single_step_can_be_followed_by_a_preemption():
    """6. Even then it gets on, because the tokens in flight count."""
    driver = Driver()
    driver.submit("a", range(6), max_tokens=10)
    for _ in range(200):
        if driver.reason("a"):
            break
        driver.step()
        driver.preempt()
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


# Slots


def test_slot_is_not_given_on_before_its_drop_is_acknowledged():
    """12."""
    driver = Driver(slots=1)
    driver.submit("a", max_tokens=9)
    driver.submit("b", (4, 5), max_tokens=3)
    driver.step(2)
    driver.abort("a")
    while driver.phase("a") is Phase.CLOSING:
        assert driver.phase("b") is Phase.WAITING
        driver.step()
    assert driver.phase("b") is not Phase.WAITING
    driver.run()
    driver.assert_answered("b")


def test_occupied_slots_never_exceed_the_maximum_in_any_mixture_of_states():
    """12. The worker asserts that a slot is free before it is taken; the seats are counted here."""
    driver = Driver(slots=3, steps_in_flight=3)
    for number in range(12):
        driver.submit(f"r{number}", (number, 50), max_tokens=6)
    for number in range(12):
        driver.step()
        driver.preempt(2)
        driver.abort(f"r{number // 2 * 2}")
        assert driver.instance.board.slots.taken <= 3
    driver.run()
    driver.assert_answered(*(f"r{number}" for number in range(1, 12, 2)))
    driver.assert_at_rest()


# Who goes, who comes back first


def test_victim_is_least_urgent_then_youngest():
    driver = Driver(slots=4)
    for name, priority in (("old", 1), ("urgent", 0), ("young", 1), ("middle", 1)):
        driver.submit(name, [len(name), priority], max_tokens=30, priority=priority)
    driver.step(2)
    gone = []
    for _ in range(4):
        running = list(driver.instance.board.running)
        driver.preempt()
        (victim,) = [s for s in running if s not in driver.instance.board.running]
        gone.append(victim.request.id)
    assert gone == ["middle", "young", "old", "urgent"]
    driver.run()
    driver.assert_answered()


def test_growth_takes_its_block_from_the_youngest_never_from_the_oldest():
    driver = Driver(blocks=6, block_size=4, slots=3)
    for name, token in zip("abc", (10, 20, 30), strict=True):
        driver.submit(name, [token] * 6, max_tokens=12)  # 2 blocks now, 5 at the end
    driver.run()
    driver.assert_answered()
    preemptions = {name: driver.ended[name, 0].preemptions for name in "abc"}
    assert preemptions["a"] == 0
    assert preemptions["c"] >= preemptions["b"]
    assert preemptions["c"] > 0
    assert [name for name, _ in driver.ended] == ["a", "b", "c"]


def test_order_is_kept_among_victims():
    """17. Three victims come back in the order in which they came first, before one that is new."""
    driver = Driver(slots=3)
    for name, token in zip("abcd", (10, 20, 30, 40), strict=True):
        driver.submit(name, [token, 1], max_tokens=20)
    driver.run_until("c", Phase.DECODE)
    driver.preempt(3)
    driver.run()
    assert driver.admissions == ["a", "b", "c", "a", "b", "c", "d"]
    driver.assert_answered()


def test_preempted_one_comes_back_before_a_new_one_of_its_class():
    """17."""
    driver = Driver(slots=2)
    driver.submit("a", max_tokens=20)
    driver.submit("b", (4, 5), max_tokens=20)
    driver.step(2)
    driver.preempt()
    driver.submit("new", (6, 7), max_tokens=2)
    driver.run()
    assert driver.admissions == ["a", "b", "b", "new"]
    driver.assert_answered()


def test_nobody_younger_is_seated_while_a_victim_waits_for_its_acknowledgement():
    """Slots and blocks are free, but the place in line is taken."""
    driver = Driver(slots=4)
    driver.submit("a", max_tokens=20)
    driver.step(2)
    driver.preempt()
    driver.submit("new", (6, 7), max_tokens=2)
    while driver.phase("a") is Phase.PREEMPTING:
        assert driver.phase("new") is Phase.WAITING
        driver.step()
    driver.run()
    assert driver.admissions == ["a", "a", "new"]


def test_more_urgent_one_is_seated_while_a_victim_waits_for_its_acknowledgement():
    driver = Driver(slots=4)
    driver.submit("a", max_tokens=20, priority=1)
    driver.step(2)
    driver.preempt()
    driver.submit("urgent", (6, 7), max_tokens=2, priority=0)
    driver.run()
    assert driver.admissions == ["a", "urgent", "a"]
    driver.assert_answered()


# Priorities


@pytest.mark.parametrize(("order", "first"), [("priority", ["now", "soon", "late"]), ("arrival", ["late", "soon", "now"])])
def test_priority_lower_is_more_urgent(order, first):
    driver = Driver(start=False, slots=1, order=order)
    for name, priority in (("late", 7), ("soon", 0), ("now", -3)):
        driver.submit(name, [priority + 10, 1], max_tokens=2, priority=priority)
    driver.restart_worker()
    driver.run()
    assert driver.admissions == first
    driver.assert_answered()


def test_urgent_request_preempts_for_a_slot():
    driver = Driver(slots=2)
    driver.submit("a", max_tokens=20, priority=5)
    driver.submit("b", (4, 5), max_tokens=20, priority=9)
    driver.step(2)
    driver.submit("urgent", (6, 7), max_tokens=3, priority=0)
    driver.run()
    driver.assert_answered()
    assert [name for name, _ in driver.ended] == ["urgent", "a", "b"]
    assert driver.ended["b", 0].preemptions == 1, "the least urgent made way, once"
    assert driver.ended["a", 0].preemptions == 0


def test_urgent_request_preempts_for_blocks():
    driver = Driver(start=False, blocks=8, block_size=4, slots=4)
    for name, priority in (("a", 1), ("b", 2), ("c", 3)):
        driver.submit(name, [priority] * 5, max_tokens=4, priority=priority)  # 2 blocks each
    driver.restart_worker()
    driver.step()
    driver.submit("urgent", range(10, 24), max_tokens=3, priority=0)  # 4 blocks, 2 are free
    driver.run()
    driver.assert_answered()
    assert {name: driver.ended[name, 0].preemptions for name in "abc"} == {"a": 0, "b": 0, "c": 1}
    driver.assert_at_rest()


@pytest.mark.parametrize("scarce", [{"slots": 2}, {"blocks": 4}])
def test_equal_urgency_never_makes_way(scarce):
    driver = Driver(block_size=4, **scarce)
    for name, token in zip("abc", (10, 20, 30), strict=True):
        driver.submit(name, [token] * 5, max_tokens=3)
    driver.run()
    driver.assert_answered()
    assert driver.instance.stats.preemptions == 0


def test_nobody_is_preempted_for_one_that_would_not_fit_even_then():
    driver = Driver(start=False, blocks=8, block_size=4, slots=4)
    driver.submit("first", range(14), max_tokens=7, priority=0)  # 4 blocks, 5 at the end
    driver.submit("lesser", (1,), max_tokens=4, priority=9)  # 1 block
    driver.restart_worker()
    driver.step()
    driver.submit("urgent", range(30, 50), max_tokens=1, priority=0)  # 5 blocks; 3 are free, 1 could be made
    driver.run()
    driver.assert_answered()
    assert driver.instance.stats.preemptions == 0
    assert driver.admissions == ["first", "lesser", "urgent"]


# Progress


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_someone_always_finishes_when_demand_is_far_above_capacity(steps_in_flight):
    """14. 24 requests that need 8 of 10 blocks each. Bounded steps, bounded preemptions a completion."""
    driver = Driver(
        blocks=10,
        block_size=4,
        slots=8,
        steps_in_flight=steps_in_flight,
        reserve_start=0.05,
        reserve_learning=0.0625,
    )
    for number in range(24):
        driver.submit(f"r{number}", [number] * 4, max_tokens=28)
    since_last, finished = 0, 0
    while driver.plans:
        driver.step()
        since_last = 0 if len(driver.ended) > finished else since_last + 1
        finished = len(driver.ended)
        assert since_last <= 60, "nobody finished for two whole outputs"
    driver.assert_answered()
    driver.assert_at_rest()
    assert driver.instance.stats.preemptions <= 2 * 24
    assert max(end.preemptions for end in driver.ended.values()) <= 6


# What routers are told


def test_who_was_preempted_is_told_until_it_runs_again():
    driver = Driver(slots=1)
    driver.submit("a", max_tokens=12)
    driver.step(3)
    assert driver.instance.view.preempted_requests(9) == []
    driver.preempt()
    assert driver.phase("a") is Phase.PREEMPTING
    assert driver.instance.view.preempted_requests(9) == ["a"]
    driver.run_until("a", Phase.DECODE)
    assert driver.instance.view.preempted_requests(9) == []


def test_the_first_in_line_are_told_where_many_were_preempted():
    driver = Driver()
    for name in ("a", "b", "c"):
        driver.submit(name, max_tokens=12)
    driver.step(3)
    driver.preempt(3)
    assert driver.instance.view.preempted_requests(9) == ["a", "b", "c"]
    assert driver.instance.view.preempted_requests(2) == ["a", "b"]


def test_one_that_waits_for_the_first_time_was_not_preempted():
    driver = Driver(slots=1)
    driver.submit("a", max_tokens=12)
    driver.submit("b", max_tokens=12)
    driver.step(3)
    driver.preempt()
    assert driver.instance.view.preempted_requests(9) == ["a"]


def test_heartbeats_have_the_held_blocks_of_the_least_urgent_priorities():
    driver = Driver(slots=4)
    assert beat_of(driver.instance, "").held == ()
    for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", -3)):
        driver.submit(name, range(3, 3 + 8), max_tokens=12, priority=priority, salt=name.encode())
    driver.step(2)
    held = {name: len(driver.sequence(name).blocks) for name in "abcd"}
    assert min(held.values()) > 0
    assert beat_of(driver.instance, "").held == ((5, held["b"] + held["c"]), (0, held["a"]), (-3, held["d"]))
    assert driver.instance.view.held_blocks(2) == ((5, held["b"] + held["c"]), (0, held["a"]))
    driver.run()
    assert beat_of(driver.instance, "").held == ()
