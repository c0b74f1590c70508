"""KV from lower tiers: who waits for it, what is trusted, what happens when it does not come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.engine.phase import Phase
from baton.core.events import BlocksMoved, CacheReady, StorageAnswered, WorkerLost
from baton.protocol.moves import MoveResult, StorageAnswer

from .tiered import TieredDriver

PROMPT = range(1, 22)  # five whole blocks of four, and a token


def warmed(**settings) -> TieredDriver:
    """One request was answered, its blocks are below, and the device has forgotten them."""
    driver = TieredDriver(**settings)
    driver.submit("first", PROMPT, max_tokens=3)
    driver.settle()
    driver.forget_device()
    assert not driver.pool.idle
    return driver


def test_a_prefix_that_the_host_has_is_loaded_and_not_computed():
    driver = warmed()
    driver.submit("again", PROMPT, max_tokens=3)
    assert driver.phase("again") is Phase.LOADING
    assert driver.kinds == ["load"]
    driver.settle()
    driver.assert_answered()
    assert driver.seated[-1].computed_tokens == 20
    assert driver.ended["again", 0].cached_tokens == 20
    driver.assert_at_rest()


def test_a_prefix_that_storage_has_is_fetched_then_loaded():
    driver = warmed(storage=True, host_blocks=16)
    driver.lose_cache(kept=False)
    driver.dispatch(CacheReady(kept=False))
    driver.submit("again", PROMPT, max_tokens=3)
    assert driver.kinds == ["query"]
    driver.carry_out()
    assert driver.kinds == ["fetch"]
    driver.carry_out()
    assert driver.kinds == ["load"]
    driver.settle()
    driver.assert_answered()
    assert driver.seated[-1].computed_tokens == 20


def test_others_go_on_while_one_loads():
    driver = warmed()
    driver.submit("again", PROMPT, max_tokens=3)
    driver.submit("other", (60, 61, 62), max_tokens=4)
    driver.run()  # the load never ends
    driver.assert_answered("other")
    assert driver.phase("again") is Phase.LOADING
    driver.settle()
    driver.assert_answered()


def test_a_load_waits_for_the_plans_that_may_still_write_to_its_blocks():
    """Two steps are in flight when blocks are taken from the one that ran in them: its last writes come first."""
    driver = TieredDriver(blocks=8, slots=2, tokens_per_step=8, steps_in_flight=2)
    driver.submit("first", PROMPT, max_tokens=2)
    driver.settle()
    driver.forget_device()
    driver.submit("writer", range(30, 35), max_tokens=3)
    assert len(driver.plans) == 2
    driver.submit("again", PROMPT, max_tokens=2)
    driver.abort("writer")
    driver.step()
    assert driver.phase("again") is Phase.LOADING
    written = driver.instance.view.oldest_step  # a plan in which the writer writes is still in flight
    assert written is not None
    while "load" not in driver.kinds:
        assert driver.instance.view.oldest_step == written
        driver.step()
    driver.settle()
    driver.assert_answered("again")


def test_a_copy_of_a_block_that_was_handed_on_meanwhile_is_thrown_away():
    driver = TieredDriver(blocks=6)
    driver.submit("first", PROMPT, max_tokens=2)
    driver.run()
    driver.submit("second", range(50, 71), max_tokens=2)  # takes the blocks that are still to be copied
    driver.run()
    driver.settle()
    assert driver.tiers.stats.lost_stores
    driver.forget_device()
    driver.submit("again", PROMPT, max_tokens=2)
    driver.settle()
    driver.assert_answered()


def test_a_block_that_is_handed_on_in_the_event_that_published_it_is_not_copied():
    driver = TieredDriver(blocks=6)
    driver.submit("first", PROMPT, max_tokens=1)
    driver.submit("second", range(50, 71), max_tokens=1)  # takes the blocks in the very event in which the first ends
    driver.run()
    driver.settle()
    driver.forget_device()
    driver.submit("again", PROMPT, max_tokens=2)
    driver.settle()
    driver.assert_answered()
    assert driver.tiers.stats.lost_stores


@pytest.mark.parametrize("moved", [0, 1, 4])
def test_what_did_not_arrive_is_computed(moved):
    driver = warmed()
    driver.submit("again", PROMPT, max_tokens=3)
    driver.carry_out("load", moved=moved)
    driver.settle()
    driver.assert_answered()
    loads = [new.computed_tokens for new in driver.seated[1:]]
    assert loads[-1] in (4 * moved, 20)  # the host still has the rest: it may be loaded after all


def test_one_that_leaves_while_it_loads_gives_its_blocks_back_when_the_copy_is_over():
    driver = warmed()
    driver.submit("again", PROMPT, max_tokens=3)
    driver.abort("again")
    assert driver.pool.free < driver.pool.total  # the service may still write there
    driver.carry_out("load")
    driver.assert_at_rest()


def test_two_that_want_the_same_blocks_load_them_once():
    driver = warmed()
    driver.submit("a", PROMPT, max_tokens=3)
    driver.submit("b", PROMPT, max_tokens=3, seed=7)
    assert driver.kinds == ["load"]
    driver.settle()
    driver.assert_answered()
    assert [new.computed_tokens for new in driver.seated[1:]] == [20, 20]


def test_the_second_goes_on_when_the_first_has_left():
    driver = warmed()
    driver.submit("a", PROMPT, max_tokens=3)
    driver.submit("b", PROMPT, max_tokens=3, seed=7)
    driver.abort("a")
    driver.settle()
    driver.assert_answered("b")


def test_a_service_that_dies_costs_time_and_nothing_else():
    driver = warmed()
    driver.submit("again", PROMPT, max_tokens=3)
    driver.lose_cache()
    driver.run()
    driver.assert_answered()
    assert driver.seated[-1].computed_tokens == 0
    driver.dispatch(CacheReady())
    driver.forget_device()
    driver.submit("third", PROMPT, max_tokens=3)
    driver.settle()
    assert driver.seated[-1].computed_tokens == 20  # what was complete was kept
    driver.assert_answered()


def test_a_service_that_lost_its_memory_has_nothing():
    driver = warmed()
    driver.lose_cache(kept=False)
    driver.dispatch(CacheReady(kept=False))
    driver.submit("again", PROMPT, max_tokens=3)
    driver.settle()
    driver.assert_answered()
    assert driver.seated[-1].computed_tokens == 0


def test_a_service_that_hangs_is_replaced_and_its_targets_stay_held_until_it_is_dead():
    driver = warmed(memory_seconds_max=2.0)
    driver.submit("again", PROMPT, max_tokens=3)
    driver.advance(1.9)
    assert not driver.cache_restarts
    driver.advance(0.2)
    assert driver.cache_restarts == 1
    assert driver.phase("again") is Phase.LOADING  # it may still be written to
    driver.lose_cache()
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_nothing_is_copied_out_of_the_pool_of_a_worker_that_broke_the_protocol():
    driver = TieredDriver(write="back", watermark=1.0, blocks=32)
    driver.submit("first", PROMPT, max_tokens=1)
    driver.run()
    driver.submit("second", range(50, 71), max_tokens=30)
    for _ in range(4):
        driver.step()
    driver.dispatch(WorkerLost(driver.instance.worker.epoch, "rows of nobody", "protocol"))
    driver.carry_out("store")  # begun before: not believed
    assert "store" not in driver.kinds
    assert not driver.tiers.stats.stored


def test_a_service_whose_answer_is_here_unread_does_not_hang():
    driver = warmed(memory_seconds_max=2.0)
    driver.submit("again", PROMPT, max_tokens=3)
    driver.now += 5.0  # the whole process was stopped; what is read first says nothing about the service
    driver.submit("other", (60, 61), max_tokens=1)
    assert not driver.cache_restarts
    driver.carry_out("load")
    driver.settle()
    driver.assert_answered()
    assert not driver.cache_restarts


def test_a_pool_that_was_lost_takes_its_loads_with_it():
    driver = warmed()
    driver.submit("again", PROMPT, max_tokens=3)
    held = driver.told.pop()
    driver.lose_worker()
    driver.restart_worker()
    driver.dispatch(BlocksMoved(MoveResult(held.id, len(held.host), 0.001)))  # into memory that nobody has any more
    driver.settle()
    driver.assert_answered()
    driver.assert_at_rest()


def test_the_host_tier_outlives_the_worker_and_its_pool():
    driver = warmed()
    driver.lose_worker()
    driver.restart_worker()  # with another pool
    driver.submit("again", PROMPT, max_tokens=3)
    assert driver.kinds == ["load"]
    driver.settle()
    driver.assert_answered()
    assert driver.ended["again", 0].host_tokens == 20


def test_storage_that_does_not_answer_holds_its_request_up_for_a_moment_only():
    driver = warmed(storage=True, storage_seconds_max=0.5)
    driver.submit("new", range(40, 61), max_tokens=3)
    assert driver.phase("new") is Phase.LOADING
    held = driver.told.pop()
    driver.advance(0.6)
    driver.run()
    driver.assert_answered()
    driver.dispatch(StorageAnswered(StorageAnswer(held.id, 5)))  # too late: inert
    driver.settle()
    driver.assert_at_rest()


def test_a_store_that_never_answers_is_asked_again_by_the_next():
    """Questions at once are bounded; one that is late makes room."""
    driver = warmed(storage=True, storage_seconds_max=0.5, load_again_after=1)  # however slow storage was so far
    driver.tiers.read_circuit.config = replace(driver.tiers.read_circuit.config, failures_max=10_000)
    for number in range(3 * driver.tiers.config.queries_max):
        driver.submit(f"r{number}", range(100 * number, 100 * number + 21), max_tokens=1)
        assert driver.phase(f"r{number}") is Phase.LOADING
        del driver.told[driver.kinds.index("query")]
        driver.advance(0.6)
        driver.settle()
        driver.assert_answered()
    assert not driver.tiers._questions, "a late answer is inert: nobody keeps anything for it"
    driver.assert_at_rest()


def test_storage_that_fails_again_and_again_is_left_alone():
    driver = TieredDriver(storage=True)
    for number in range(10):
        driver.submit(f"r{number}", range(100 * number, 100 * number + 21), max_tokens=2)
        while driver.told or driver.plans:
            if not driver.told:
                driver.step()
            elif driver.kinds[0] == "store":
                driver.carry_out()
            else:
                driver.carry_out(error="EIO", moved=0)
    assert driver.tiers.read_circuit.state == driver.tiers.write_circuit.state == "open"
    driver.submit("last", range(2000, 2021), max_tokens=2)
    assert driver.phase("last") is not Phase.LOADING
    driver.settle()
    driver.assert_answered()


def preempted(policy: str) -> tuple[TieredDriver, int]:
    """A victim has lost its blocks on the device before it is back in line: only a lower tier can have them. With `storage`
    the host tier has lost them too. Returns the tokens it had."""
    driver = TieredDriver(storage=policy == "storage", preempted=policy, write="selective", write_hits=99, blocks=16)
    driver.submit("victim", PROMPT, max_tokens=30)
    if policy == "storage":
        driver.carry_out("query")
    for _ in range(14):
        driver.step()
    driver.preempt()
    assert driver.phase("victim") is Phase.PREEMPTING
    while driver.told:
        driver.carry_out()
    if policy == "storage":
        driver.lose_cache(kept=False)
        driver.dispatch(CacheReady(kept=False))
    driver.forget_device()
    assert not driver.pool.idle
    assert driver.phase("victim") is Phase.PREEMPTING, "it is not back in line yet"
    return driver, len(driver.sequence("victim").tokens)


@pytest.mark.parametrize("policy", ["host", "storage"])
def test_a_preempted_sequence_finds_prompt_and_output_again(policy):
    driver, known = preempted(policy)
    while driver.phase("victim") is Phase.PREEMPTING:
        driver.step()
    assert driver.phase("victim") is Phase.LOADING
    assert driver.kinds == ["load" if policy == "host" else "query"]
    driver.settle()
    driver.assert_answered()
    resumed = driver.seated[-1]
    assert len(driver.seated) == 2
    assert len(resumed.tokens) >= known > len(PROMPT)
    assert resumed.computed_tokens >= (known - 3) // 4 * 4 > len(PROMPT), "all but what was in flight"


def test_a_preempted_sequence_whose_blocks_are_dropped_is_computed_again():
    driver, known = preempted("drop")
    driver.settle()
    driver.assert_answered()
    assert len(driver.seated[-1].tokens) >= known
    assert driver.seated[-1].computed_tokens == 0


def test_drop_parks_nothing():
    driver = TieredDriver(preempted="drop", write="selective", write_hits=99)
    driver.submit("victim", PROMPT, max_tokens=30)
    for _ in range(8):
        driver.step()
    driver.preempt()
    driver.run()
    assert not driver.told
    driver.assert_answered()


def test_without_tiers_nothing_is_told():
    driver = TieredDriver(host_blocks=0)
    driver.submit("a", PROMPT, max_tokens=5)
    driver.run()
    assert not driver.told
    driver.assert_answered()


def test_a_load_that_is_slower_than_computing_is_not_begun():
    driver = warmed()
    driver.tiers.rates["load"].seconds = 10.0
    driver.instance._pace.price = 0.001
    driver.submit("again", PROMPT, max_tokens=3)
    assert driver.phase("again") is not Phase.LOADING
    driver.settle()
    driver.assert_answered()


def test_a_lease_is_given_up_when_a_running_sequence_needs_the_block():
    driver = TieredDriver(blocks=12, slots=1, tokens_per_step=8)
    driver.submit("first", PROMPT, max_tokens=2)
    driver.settle()
    driver.forget_device()
    driver.submit("runner", range(60, 64), max_tokens=40)
    driver.step()
    driver.submit("again", PROMPT, max_tokens=2)
    driver.settle()
    driver.assert_answered()
    driver.assert_at_rest()


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("write", ["through", "selective", "back"])
def test_a_service_without_a_host_tier_is_told_of_no_block_and_nothing_piles_up(write: str, peers: bool):
    """It is there for hand-offs. What was published used to be noted for a store that never came."""
    driver = TieredDriver(host_blocks=0, peers=peers, write=write)
    for turn in range(5):
        driver.submit(f"r{turn}", PROMPT, max_tokens=12)
        driver.settle()
    driver.assert_answered()
    assert not driver.told
    assert not driver.instance.board.tiers.writes.to_store
    assert driver.instance.board.tiers.stats.skipped_stores == 0, "nothing was to be stored"
    driver.assert_at_rest()
