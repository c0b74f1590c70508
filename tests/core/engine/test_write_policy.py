"""What is copied down, and when: each policy of `--kv-write`, what a full storage costs, what clearing the cache means."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from baton.config import TierConfig
from baton.core.engine.phase import Phase
from baton.core.events import BlocksMoved, ForgetCache, StorageAnswered, Tick
from baton.core.kv.block_pool import BlockPool
from baton.core.kv.host_tier import HostTier
from baton.core.kv.prefix_cache import PrefixCache
from baton.core.kv.write_policy import WritePolicy
from baton.protocol.ids import BlockId, BlockKey
from baton.protocol.moves import BlockMove, MoveResult, StorageAnswer

from .tiered import TieredDriver

PROMPT = range(1, 22)  # five whole blocks of four, and a token
ORDERS = count(1)


def ask(driver: TieredDriver, name: str, prompt: range = PROMPT, max_tokens: int = 3) -> None:
    driver.submit(name, prompt, max_tokens=max_tokens)
    driver.settle()
    driver.assert_answered()


# Policies


@pytest.mark.parametrize(("outputs", "blocks"), [(True, 7), (False, 5)])
def test_through_copies_what_is_computed_with_or_without_what_was_generated(outputs: bool, blocks: int):
    driver = TieredDriver(write="through", write_outputs=outputs)
    ask(driver, "a", max_tokens=9)  # 21 + 9 tokens, the last one never computed: seven whole blocks
    assert len(driver.tiers.host) == blocks == driver.tiers.stats.stored


def test_selective_copies_what_was_found_again_often_enough():
    driver = TieredDriver(write="selective", write_hits=2)
    ask(driver, "first")
    ask(driver, "second")
    assert not driver.tiers.stats.stored, "found again once"
    ask(driver, "third")
    assert driver.tiers.stats.stored == 5, "found again twice: the prompt, and nothing that was generated"


def test_back_copies_what_would_be_evicted_next_before_it_has_to_be():
    driver = TieredDriver(write="back", watermark=0.5, blocks=12)
    ask(driver, "first")
    assert not driver.tiers.stats.stored, "more than half of the blocks are free"
    ask(driver, "second", range(30, 51))
    assert driver.tiers.stats.stored, "the watermark is passed"
    ask(driver, "third", range(60, 81))  # takes blocks of the first one
    assert driver.instance.board.cache.evicted
    assert driver.tiers.stats.lost_stores == 0
    driver.submit("first again", PROMPT, max_tokens=3)
    assert "load" in driver.kinds
    driver.settle()
    driver.assert_answered()


def test_back_looks_for_cold_blocks_only_when_something_has_changed(monkeypatch: pytest.MonkeyPatch):
    looks: list[int] = []
    coldest = PrefixCache.coldest
    monkeypatch.setattr(PrefixCache, "coldest", lambda cache, count: looks.append(count) or coldest(cache, count))
    driver = TieredDriver(write="back", watermark=1.0, blocks=24)
    ask(driver, "first")
    assert looks
    looks.clear()
    for _ in range(5):
        driver.dispatch(Tick())
    assert not looks


def test_what_a_preempted_sequence_has_on_the_host_is_evicted_last():
    driver = TieredDriver(preempted="host", blocks=32)
    driver.submit("victim", PROMPT, max_tokens=30)
    driver.step()
    driver.carry_out("store")
    other = TieredDriver(blocks=32)
    ask(other, "other", range(60, 81))
    host = driver.tiers.host
    for key, block in zip(other.tiers.host.index(), host.take(5), strict=True):
        host.insert(key, block)  # used after the victim's blocks were stored
    victim = driver.sequence("victim").keys[:5]
    assert next(iter(host.index())) in victim
    driver.preempt()
    assert sorted(list(host.index())[-5:]) == sorted(victim)
    driver.settle()
    driver.assert_answered()


def test_blocks_that_wait_to_be_put_are_bounded_and_the_oldest_are_left_out():
    driver = TieredDriver(storage=True, put_blocks=1, host_blocks=16)  # a quarter of the host at once
    for number in range(3):
        driver.submit(f"r{number}", range(100 * number, 100 * number + 21), max_tokens=1)
        driver.carry_out("query")
        while driver.plans or "store" in driver.kinds:
            driver.step() if driver.plans else driver.carry_out("store")
    assert driver.kinds == ["put"] * 4
    assert len(driver.tiers.writes.to_put) <= 4
    assert driver.tiers.stats.skipped_puts >= 3
    driver.settle()
    driver.assert_at_rest()


@pytest.mark.parametrize("first_put_fails", [False, True])
def test_what_a_preempted_sequence_has_on_storage_is_not_put_again_and_what_it_has_not_is(first_put_fails: bool):
    driver = TieredDriver(storage=True, preempted="storage", write="through", blocks=16)
    driver.submit("victim", PROMPT, max_tokens=30)
    driver.carry_out("query")
    put: list[bytes] = []

    def copy_all(fails: bool) -> None:
        while driver.told:
            message = driver.told[0]
            is_put = isinstance(message, BlockMove) and message.kind == "put"
            put.extend(message.keys if is_put else ())
            driver.carry_out(moved=0 if is_put and fails else None, error="broken" if is_put and fails else None)

    for step in range(8):
        driver.step()
        copy_all(first_put_fails and step < 4)
    before = list(put)
    assert before
    driver.preempt()
    while driver.phase("victim") is Phase.PREEMPTING:
        driver.step()
        copy_all(False)
    again = [key for key in put[len(before) :] if key in before]
    assert bool(again) == first_put_fails
    driver.settle()
    driver.assert_answered()


def test_a_host_tier_that_is_full_skips_copies_and_says_so():
    """A full tier is no error: vLLM's crashed."""
    driver = TieredDriver(host_blocks=2)
    driver.submit("a", PROMPT, max_tokens=3)
    while "store" not in driver.kinds:
        driver.step()
    first = driver.told[driver.kinds.index("store")]
    assert isinstance(first, BlockMove)
    assert len(first.host) == 2
    assert driver.tiers.stats.skipped_stores == 3
    driver.settle()
    driver.assert_answered()


def test_what_another_instance_has_computed_is_that_ones_to_put_on_storage():
    key, other = BlockKey(b"k" * 32), BlockKey(b"o" * 32)
    books: Any = SimpleNamespace(pool=BlockPool(4))
    policy = WritePolicy(TierConfig(host_blocks=4, storage=True, write="through"), books, HostTier(4))
    policy.published(key, BlockId(1), prompt=True)
    policy.adopted(other, BlockId(2))
    assert policy.to_store == {key: (1, 0, True), other: (2, 0, False)}


# Storage that takes no more


def fill_up(driver: TieredDriver, requests: int) -> None:
    for number in range(requests):
        driver.submit(f"r{number}", range(100 * number, 100 * number + 21), max_tokens=2)
        while driver.told or driver.plans:
            if not driver.told:
                driver.step()
            elif "put" in driver.kinds:
                driver.carry_out("put", error="full", moved=0)
            else:
                driver.carry_out()


def test_a_storage_that_is_full_is_still_read():
    driver = TieredDriver(storage=True, host_blocks=16)
    ask(driver, "kept")
    assert driver.storage
    fill_up(driver, 8)
    assert driver.tiers.write_circuit.state == "open"
    assert driver.tiers.read_circuit.state == "closed"
    assert driver.tiers.stats.skipped_puts, "an open circuit is not asked"
    driver.dispatch(ForgetCache(1))
    driver.submit("again", PROMPT, max_tokens=3)
    assert driver.kinds == ["query"]
    driver.settle()
    driver.assert_answered()
    assert driver.seated[-1].computed_tokens == 20
    assert driver.ended["again", 0].storage_tokens == 20


def test_a_full_storage_takes_blocks_again_when_there_is_room():
    driver = TieredDriver(storage=True)
    fill_up(driver, 8)
    driver.advance(120.0)
    before = len(driver.storage)
    ask(driver, "later", range(3000, 3021))
    assert driver.tiers.write_circuit.state == "closed"
    assert len(driver.storage) > before


# A cache that is cleared


def cleared(driver: TieredDriver) -> None:
    driver.dispatch(ForgetCache(next(ORDERS)))
    driver.instance.check()
    assert not len(driver.tiers.host)


def test_what_is_on_its_way_to_the_host_when_the_cache_is_cleared_is_not_found():
    driver = TieredDriver()
    driver.submit("a", PROMPT, max_tokens=3)
    while "store" not in driver.kinds:
        driver.step()
    cleared(driver)
    driver.settle()
    driver.assert_answered()
    driver.dispatch(ForgetCache(next(ORDERS), host=False))
    driver.submit("b", PROMPT, max_tokens=3)
    assert "load" not in driver.kinds, "copied before the clearing, arrived after it"
    driver.settle()
    driver.assert_answered()
    driver.assert_at_rest()


def test_what_is_fetched_when_the_cache_is_cleared_is_computed():
    driver = TieredDriver(storage=True)
    ask(driver, "first")
    cleared(driver)
    driver.submit("again", PROMPT, max_tokens=3)
    driver.carry_out("query")
    assert driver.kinds == ["fetch"]
    cleared(driver)
    driver.carry_out("fetch")
    driver.instance.check()
    driver.settle()
    driver.assert_answered()
    assert driver.ended["again", 0].cached_tokens == 0
    driver.assert_at_rest()


@pytest.mark.parametrize("kind", ["load", "put"])
def test_a_block_that_is_read_when_the_cache_is_cleared_is_free_when_that_is_over(kind: str):
    driver = TieredDriver(storage=kind == "put")
    driver.submit("first", PROMPT, max_tokens=3)
    while "put" not in driver.kinds and (driver.plans or driver.told):
        if driver.told:
            driver.carry_out()
        else:
            driver.step()
    if kind == "load":
        driver.settle()
        driver.forget_device()
        driver.submit("again", PROMPT, max_tokens=3)
    assert kind in driver.kinds
    cleared(driver)
    assert driver.tiers.host.free < driver.tiers.host.total, "a move still reads"
    driver.carry_out(kind)
    driver.instance.check()
    driver.settle()
    driver.assert_answered()
    if kind == "load":
        assert driver.ended["again", 0].host_tokens == 20, "whoever was loading uses what it was promised"
    assert not any(driver.tiers.host._pins)
    driver.assert_at_rest()


# Other weights


def test_other_weights_find_nothing_of_the_old_ones_on_any_tier_and_late_copies_are_inert():
    driver = TieredDriver(storage=True)
    ask(driver, "old")
    ask(driver, "old too", range(30, 51))
    assert driver.storage
    driver.submit("under way", range(60, 81), max_tokens=3)
    driver.carry_out("query")
    while "store" not in driver.kinds:
        driver.step()
    late = driver.told.pop(driver.kinds.index("store"))
    driver.run()
    assert isinstance(late, BlockMove)
    driver.lose_worker("killed")
    driver.restart_worker(fingerprint=b"other weights")
    driver.copy(late, len(late.host))
    driver.dispatch(BlocksMoved(MoveResult(late.id, len(late.host), 0.001)))  # of the pool and the weights before
    driver.instance.check()
    for number, prompt in enumerate((PROMPT, range(30, 51), range(60, 81))):
        driver.submit(f"new{number}", prompt, max_tokens=3)
        assert driver.kinds[-1] == "query", "nothing is loaded from the host"
        driver.settle()
        assert driver.ended[f"new{number}", 0].cached_tokens == 0
    driver.assert_answered()
    driver.assert_at_rest()


def test_an_answer_of_storage_that_comes_twice_changes_nothing():
    driver = TieredDriver(storage=True)
    ask(driver, "first")
    cleared(driver)
    driver.submit("again", PROMPT, max_tokens=3)
    asked = driver.told[0]
    driver.carry_out("query")
    driver.dispatch(StorageAnswered(StorageAnswer(asked.id, 5)))
    assert driver.kinds == ["fetch"]
    driver.settle()
    driver.assert_answered()
