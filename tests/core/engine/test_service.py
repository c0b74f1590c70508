"""Service: who gets in, and when. Cases of the review of the core, sections 1.1 to 1.8."""

import gc

import pytest

from baton.config import SchedulerConfig
from baton.core.engine.phase import Phase
from baton.core.engine.request import Group, Sequence
from baton.core.engine.reserve import GrowthReserve
from baton.core.instance import Instance

from .harness import Driver
from .stub_line import StubLine


def steps_until_admitted(driver: Driver, name: str, steps_max: int = 5000) -> int:
    for steps in range(steps_max):
        if driver.phase(name) is not Phase.WAITING:
            return steps
        driver.step()
    raise AssertionError(f"{name} was never admitted")


def test_an_urgent_arrival_is_not_locked_out_by_the_preemption_that_was_made_for_it():
    """1.1: C waited 3,996 steps, until A ended."""
    driver = Driver(slots=8, blocks=300, block_size=16, tokens_per_step=4096, reserve_start=0.05, reserve_learning=0.0625)
    driver.submit("A", range(100, 164), max_tokens=4000)
    driver.submit("B", [place % 91 for place in range(16 * 30)], max_tokens=16, priority=5)
    driver.step(3)
    available = driver.instance.board.cache.available
    reserved = driver.instance.board.reserve.blocks(driver.sequence("A"))
    driver.submit("C", [(place + 50) % 89 for place in range(16 * (available - reserved + 2))], max_tokens=1, priority=1)
    assert steps_until_admitted(driver, "C") <= 3, "no more than the worker's acknowledgement takes"
    assert driver.instance.stats.preemptions == 1
    driver.abort("A")
    driver.run()
    driver.assert_answered("B", "C")


def burst(*, reserve_start: float, reserve_learning: float) -> Instance:
    """128 open-ended requests (4,000 tokens declared, 60 used) on 64 slots and 1,024 blocks."""
    settings = {"slots": 64, "blocks": 1024, "block_size": 16, "tokens_per_step": 8192}
    line = StubLine(outputs=60, reserve_start=reserve_start, reserve_learning=reserve_learning, **settings)
    for number in range(128):
        line.submit(f"r{number}", [number, 3, 5, 7], max_tokens=4000)
    while line.plans:
        line.step()
    assert line.instance.idle
    return line.instance


def test_a_burst_of_open_ended_requests_is_not_starved_by_the_reserve():
    """1.2: 312 steps where 133 are possible."""
    free = burst(reserve_start=0.0, reserve_learning=0.0)
    learned = burst(reserve_start=SchedulerConfig().reserve_start, reserve_learning=SchedulerConfig().reserve_learning)
    assert learned.stats.steps <= 1.1 * free.stats.steps
    assert learned.stats.preemptions == 0


def test_an_urgent_request_preempts_where_the_running_ones_take_the_whole_step():
    """1.3: with tokens_per_step == slots it waited 200 steps, with no preemption."""
    driver = Driver(slots=2, tokens_per_step=2)
    driver.submit("a", (1, 2), max_tokens=100, priority=1)
    driver.submit("b", (3, 4), max_tokens=100, priority=1)
    driver.run_until("b", Phase.DECODE)
    driver.submit("urgent", (5, 6), max_tokens=4)
    assert steps_until_admitted(driver, "urgent") <= 4
    assert driver.instance.stats.preemptions == 1
    driver.run()
    driver.assert_answered()


def test_nobody_loses_a_slot_to_a_head_that_would_not_fit_by_blocks():
    """1.4: the lesser one lost its slot, the head still did not fit, and both waited."""
    driver = Driver(slots=2, blocks=9, block_size=4)
    driver.submit("first", range(20), max_tokens=4)  # 5 blocks, 6 at the end
    driver.submit("lesser", (1, 2), max_tokens=3, priority=1)  # 1 block
    driver.run_until("lesser", Phase.DECODE)
    driver.submit("head", range(30, 50), max_tokens=1)  # 5 blocks; 3 are free and 1 is to be had
    driver.step()
    assert driver.instance.stats.preemptions == 0
    driver.run()
    driver.assert_answered()
    assert driver.instance.stats.preemptions == 0


def test_blocks_shared_with_one_that_stays_do_not_count_as_gained():
    """1.5: two were preempted for two blocks, where four were needed."""
    driver = Driver(slots=4, blocks=12, block_size=4)
    shared = list(range(16))
    driver.submit("top", [*shared, 50], max_tokens=12)
    driver.run_until("top", Phase.DECODE)
    for name, last in (("l1", 51), ("l2", 52)):
        driver.submit(name, [*shared, last], max_tokens=3, priority=2)
        driver.run_until(name, Phase.DECODE)
    assert driver.pool.free + driver.pool.idle == 5
    driver.submit("urgent", range(60, 60 + 9 * 4), max_tokens=1, priority=1)  # 9 blocks; 7 are to be had
    driver.step()
    assert driver.instance.stats.preemptions == 0
    driver.run()
    driver.assert_answered()


def test_blocks_that_two_victims_share_count_once_and_do_count():
    driver = Driver(slots=4, blocks=8, block_size=4)
    shared = list(range(16))
    for name, last in (("l1", 51), ("l2", 52)):
        driver.submit(name, [*shared, last], max_tokens=3, priority=2)
        driver.run_until(name, Phase.DECODE)
    assert driver.pool.free + driver.pool.idle == 2
    driver.submit("urgent", range(60, 60 + 8 * 4), max_tokens=1, priority=1)  # all 8 blocks
    assert steps_until_admitted(driver, "urgent") <= 4
    assert driver.instance.stats.preemptions == 2
    driver.run()
    driver.assert_answered()


def test_blocks_that_the_head_itself_would_share_are_not_gained():
    """They come free by the preemption, and the head takes them again."""
    driver = Driver(slots=4, blocks=8, block_size=4)
    shared = list(range(16))
    driver.submit("top", range(60, 66), max_tokens=6)
    driver.run_until("top", Phase.DECODE)
    driver.submit("lesser", [*shared, 51], max_tokens=3, priority=2)
    driver.run_until("lesser", Phase.DECODE)
    driver.submit("urgent", [*shared, *range(70, 82)], max_tokens=1, priority=1)  # 4 hits and 3 new; 1 is free, 1 to be had
    driver.step()
    assert driver.instance.stats.preemptions == 0
    driver.run()
    driver.assert_answered()


@pytest.mark.parametrize("lesser", [2, 3, 5])
def test_no_more_are_preempted_than_let_the_head_in(lesser):
    driver = Driver(slots=8, blocks=2 * lesser, block_size=4)
    for number in range(lesser):
        driver.submit(f"l{number}", [number] * 5, max_tokens=4, priority=1)
    for number in range(lesser):
        driver.run_until(f"l{number}", Phase.DECODE)
    driver.submit("urgent", range(60, 69), max_tokens=1)  # 3 blocks: two victims
    assert steps_until_admitted(driver, "urgent") <= 4
    assert driver.instance.stats.preemptions == 2
    driver.run()
    driver.assert_answered()


def test_admitting_a_burst_asks_for_the_growth_of_each_once(monkeypatch):
    """1.7: each admission summed up the growth of all that ran: 512 in one event took 108 ms, of which 86 were that."""
    asked = 0
    blocks = GrowthReserve.blocks

    def counted(self: GrowthReserve, sequence: Sequence) -> int:
        nonlocal asked
        asked += 1
        return blocks(self, sequence)

    monkeypatch.setattr(GrowthReserve, "blocks", counted)
    driver = Driver(start=False, slots=128, blocks=4096, tokens_per_step=4096, steps_in_flight=1)
    for number in range(128):
        driver.submit(f"r{number}", [number, 1, 2], max_tokens=50, priority=number % 3)
    driver.restart_worker()
    assert len(driver.instance.board.running) == 128
    assert asked <= 3 * 2 * 128, "for each of three classes"


def test_ended_requests_are_freed_without_the_cyclic_collector():
    """1.8: 200 ended requests stayed in memory, with their tokens and keys, until a collection."""
    gc.collect()
    gc.disable()
    try:
        driver = Driver()
        for number in range(20):
            driver.submit(f"r{number}", (1, 2, number), max_tokens=3, n=2)
        driver.run()
        driver.sequences.clear()
        assert not [thing for thing in gc.get_objects() if isinstance(thing, (Group, Sequence))]
    finally:
        gc.enable()
