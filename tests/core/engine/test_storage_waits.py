"""Waiting for storage: who waits has a deadline, storage has another, and nothing is left behind by either."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from baton.core.engine.loading import SequenceLoad
from baton.core.engine.phase import Phase
from baton.core.events import BlocksMoved, CacheReady, StorageAnswered
from baton.errors import InvariantBroken
from baton.protocol.moves import MoveResult, StorageAnswer

from .tiered import TieredDriver

PROMPT = range(1, 22)  # five whole blocks of four, and a token


def cold(**settings) -> TieredDriver:
    """Storage has the blocks of PROMPT, and no other tier has."""
    driver = TieredDriver(**({"storage": True, "host_blocks": 16, "storage_seconds_max": 1.0} | settings))
    driver.submit("first", PROMPT, max_tokens=3)
    driver.settle()
    driver.lose_cache(kept=False)
    driver.dispatch(CacheReady(kept=False))
    driver.forget_device()
    driver.told.clear()
    return driver


def loads() -> int:
    """Stays in LOADING that something still refers to."""
    gc.collect()
    return sum(isinstance(thing, SequenceLoad) for thing in gc.get_objects())


def number_of(driver: TieredDriver, kind: str) -> int:
    return driver.told[driver.kinds.index(kind)].id


# Late for the asker


def test_one_slow_fetch_with_many_waiters_is_no_failure_of_storage():
    driver = cold(spare_seconds=0.1)
    driver.instance._pace.price = 0.0
    for name in "abcd":
        driver.submit(name, PROMPT, max_tokens=2, seed=ord(name))
        if name == "a":
            driver.carry_out("query")
    assert driver.kinds == ["fetch"]
    assert [driver.phase(name) for name in "abcd"] == [Phase.LOADING] * 4
    driver.advance(0.2)
    assert Phase.LOADING not in [driver.phase(name) for name in "abcd"], "none of them waits any longer"
    circuit = driver.tiers.read_circuit
    assert (circuit.state, circuit._failures, circuit.permits) == ("closed", 0, 1), "storage still has its time"
    driver.advance(0.9)
    assert (circuit.state, circuit._failures, circuit.permits) == ("closed", 1, 0), "counted once"
    driver.dispatch(BlocksMoved(MoveResult(number_of(driver, "fetch"), 0, 2.0, "EIO")))
    assert circuit._failures == 1, "the fetch had been counted"
    driver.told.clear()
    driver.settle()
    driver.assert_answered()
    driver.assert_at_rest()


def test_storage_that_is_too_slow_for_short_prompts_is_asked_for_long_ones():
    """Short prompts do not wait for answers that come too late for them, and do not take storage away from the others."""
    driver = cold(spare_seconds=0.05, load_again_after=1000)
    driver.instance._pace.price = 0.001
    for number in range(8):
        begin = 1000 * number + 100
        driver.submit(f"short{number}", range(begin, begin + 9), max_tokens=1)
        if driver.phase(f"short{number}") is Phase.LOADING:
            driver.advance(0.2)
            driver.carry_out("query")
        driver.settle()
        driver.instance._pace.price = 0.001
    assert driver.tiers.read_circuit.state == "closed"
    assert 0.1 < driver.tiers.answer_rate.seconds < 0.3
    driver.submit("short", range(50, 59), max_tokens=1)
    assert driver.phase("short") is not Phase.LOADING, "its patience is shorter than storage takes"
    driver.settle()
    driver.instance._pace.price = 0.02
    driver.submit("long", PROMPT, max_tokens=1)
    assert driver.phase("long") is Phase.LOADING
    driver.settle()
    driver.assert_answered()
    driver.assert_at_rest()


def test_a_late_answer_leaves_nothing_behind():
    driver = cold(load_again_after=1)
    driver.tiers.read_circuit.config = replace(driver.tiers.read_circuit.config, failures_max=10_000)
    driver.instance._pace.price = 0.0
    before = loads()
    for number in range(50):
        driver.submit(f"r{number}", range(100 * number + 50, 100 * number + 71), max_tokens=1)
        assert driver.phase(f"r{number}") is Phase.LOADING
        asked = driver.told.pop(driver.kinds.index("query"))
        driver.advance(0.1)
        driver.settle()
        driver.dispatch(StorageAnswered(StorageAnswer(asked.id, 0)))
    assert loads() == before
    driver.assert_answered()
    driver.assert_at_rest()


# Storage that never answers


def test_a_question_whose_asker_left_is_given_up():
    driver = cold(queries_max=4, load_again_after=1)
    driver.tiers.read_circuit.config = replace(driver.tiers.read_circuit.config, failures_max=10_000)
    for number in range(12):
        driver.submit(f"r{number}", range(100 * number + 50, 100 * number + 71), max_tokens=1)
        driver.abort(f"r{number}")
    assert driver.tiers.questions == 4
    assert driver.instance.next_deadline() is not None
    driver.told.clear()
    driver.advance(1.1)
    assert not driver.tiers.questions
    assert not driver.tiers.storage_calls
    assert not driver.instance._loader._unasked
    driver.submit("next", range(900, 921), max_tokens=1)
    assert "query" in driver.kinds, "there is room for another question"
    driver.settle()
    driver.assert_at_rest()


def test_those_that_wait_to_be_asked_for_are_forgotten_when_they_leave():
    driver = cold(queries_max=1)
    for number in range(500):
        driver.submit(f"r{number}", range(100 * number + 50, 100 * number + 71), max_tokens=1)
        driver.abort(f"r{number}")
    assert len(driver.instance._loader._unasked) <= 65


@pytest.mark.parametrize("kind", ["put", "fetch"])
def test_a_call_that_never_comes_back_from_storage_ends_with_the_service(kind):
    """Its thread may touch the host blocks at any time, so they are free only when the service is dead."""
    driver = cold(memory_seconds_max=2.0) if kind == "fetch" else TieredDriver(storage=True, memory_seconds_max=2.0)
    driver.submit("again", PROMPT, max_tokens=3)
    driver.carry_out("query")
    while kind not in driver.kinds:
        driver.step() if driver.plans else driver.carry_out("store")
    driver.run()
    driver.told = [message for message in driver.told if getattr(message, "kind", "") != kind]  # it is never answered
    driver.settle()
    driver.told.clear()
    assert any(driver.tiers.host._writing) or any(driver.tiers.host._pins)
    driver.advance(2.9 if kind == "fetch" else 11.9)
    assert not driver.cache_restarts
    driver.advance(3.0)
    assert driver.cache_restarts == 1
    assert any(driver.tiers.host._writing) or any(driver.tiers.host._pins), "it may still be touched"
    driver.lose_cache()
    assert not any(driver.tiers.host._writing)
    assert not any(driver.tiers.host._pins)
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_moves_that_wait_for_each_other_in_the_service_are_not_overdue():
    """Each may take all of its time, one after the other."""
    driver = TieredDriver(storage=True, memory_seconds_max=2.0, put_blocks=2, storage_seconds_max=1.0)
    driver.submit("a", PROMPT, max_tokens=10)
    driver.carry_out("query")
    while driver.plans or "store" in driver.kinds:
        driver.step() if driver.plans else driver.carry_out("store")
    puts = driver.kinds.count("put")
    assert puts >= 3
    for _ in range(puts):
        driver.advance(9.9)
        assert not driver.cache_restarts
        driver.carry_out("put")
    driver.advance(100.0)
    assert not driver.cache_restarts
    driver.assert_at_rest()


# The proof


def test_check_finds_one_that_waits_for_what_is_not_under_way():
    driver = cold()
    driver.submit("a", PROMPT, max_tokens=2)
    load = driver.sequence("a").load
    pending = load.pending
    pending.waiters.clear()
    with pytest.raises(InvariantBroken, match="waits for nothing"):
        driver.instance.check()
    pending.waiters[load] = None
    driver.instance.check()
    del driver.tiers._questions[pending.id]
    with pytest.raises(InvariantBroken, match="not under way"):
        driver.instance.check()
    driver.tiers._questions[pending.id] = pending
    driver.sequence("a").load = None
    with pytest.raises(InvariantBroken, match="does not wait"):
        driver.instance.check()


# Worth


def warmed(**settings) -> TieredDriver:
    """The host tier has the blocks of PROMPT, and the device has forgotten them."""
    driver = TieredDriver(**settings)
    driver.submit("first", PROMPT, max_tokens=3)
    driver.settle()
    driver.forget_device()
    return driver


def test_a_head_that_is_looked_at_again_and_again_is_not_loaded_for_that():
    driver = warmed(slots=1, load_again_after=4)
    driver.submit("runner", range(60, 64), max_tokens=40)
    driver.tiers.rates["load"].seconds = 10.0
    driver.submit("again", PROMPT, max_tokens=3)
    for _ in range(20):
        driver.instance._pace.price = 0.001
        driver.step()
        assert driver.phase("again") is Phase.WAITING, "it waits for the slot"
    driver.settle()
    driver.assert_answered()


def test_one_load_in_so_many_is_made_though_it_is_not_worth_it():
    driver = warmed(load_again_after=4)
    loaded = []
    for number in range(12):
        driver.tiers.rates["load"].seconds = 10.0
        driver.instance._pace.price = 0.001
        driver.submit(f"r{number}", PROMPT, max_tokens=1)
        loaded.append(driver.phase(f"r{number}") is Phase.LOADING)
        driver.settle()
        driver.forget_device()
    assert loaded == [False, False, False, True] * 3


# Room for loads


def test_a_head_that_waits_for_room_to_load_is_computed_when_that_takes_longer():
    driver = TieredDriver(blocks=24, slots=4, spare_seconds=0.1)
    for name, begin in (("a", 1), ("b", 101)):
        driver.submit(name, range(begin, begin + 41), max_tokens=1)
        driver.settle()
        driver.forget_device()
    driver.instance._pace.price = 0.0
    driver.submit("first", range(1, 42), max_tokens=2)
    driver.submit("second", range(101, 142), max_tokens=2)
    driver.submit("third", (60, 61, 62), max_tokens=2)
    assert driver.kinds == ["load"]
    assert driver.phase("first") is Phase.LOADING
    assert driver.phase("second") is driver.phase("third") is Phase.WAITING
    driver.advance(0.2)
    assert driver.phase("second") is Phase.PREFILL or driver.phase("second") is Phase.DECODE
    driver.run()
    driver.assert_answered("second", "third")
    driver.settle()
    driver.assert_answered()
    driver.assert_at_rest()


# Stores


def test_a_block_whose_copy_is_under_way_is_not_copied_again():
    driver = TieredDriver(write="selective", write_hits=1)
    driver.submit("first", PROMPT, max_tokens=1)
    driver.run()
    for name in "abc":
        driver.submit(name, PROMPT, max_tokens=1, seed=ord(name))
        driver.run()
    assert driver.kinds == ["store"]
    assert driver.tiers._storing == 5
    driver.settle()
    assert len(driver.tiers.host) == 5
    assert not driver.tiers.writes._storing
    driver.assert_at_rest()


def test_a_block_that_is_parked_while_its_copy_is_under_way_goes_on_to_storage():
    driver = TieredDriver(storage=True, write="back", preempted="storage", watermark=0.9, blocks=8)
    driver.submit("first", PROMPT, max_tokens=1)
    driver.carry_out("query")
    driver.run()
    assert driver.kinds == ["store"], "idle blocks are copied ahead, and not put on storage"
    driver.submit("victim", PROMPT, max_tokens=3, seed=1)
    driver.step()
    assert driver.kinds == ["store"]
    driver.preempt()
    driver.carry_out("store")
    assert "put" in driver.kinds
    assert driver.tiers.host.free > 0.9 * driver.tiers.host.total, "it was not put to make room on the host"
    driver.settle()
    driver.assert_answered()
