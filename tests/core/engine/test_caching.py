"""The prefix cache as requests see it."""

import pytest

from baton.core.engine.phase import Phase
from baton.core.events import EvictSome
from baton.core.kv.block_hash import BlockHasher
from baton.protocol.request import FinishReason

from .harness import Driver, stop_at

PROMPT = tuple(range(10, 18))


@pytest.mark.parametrize(("prompt_tokens", "outputs", "cached_blocks"), [(4, 4, 1), (5, 4, 2), (5, 3, 1), (4, 5, 2), (8, 1, 2)])
@pytest.mark.parametrize("end", ["length", "stop"])
def test_only_computed_tokens_are_cached(prompt_tokens, outputs, cached_blocks, end):
    """23. The last token is never computed, so a total that is a multiple of the block size leaves its last block out."""
    driver = Driver(block_size=4)
    prompt = range(prompt_tokens)
    given = {"max_tokens": outputs}
    if end == "stop":
        given = {"max_tokens": 30, "stop_token_ids": (stop_at(outputs - 1, prompt),)}
    driver.submit("a", prompt, **given)
    driver.run()
    driver.assert_answered()
    assert len(driver.instance.board.cache) == cached_blocks
    assert driver.pool.idle == cached_blocks

    driver.submit("b", [*prompt, *driver.heard("a"), 99], max_tokens=6)
    driver.run()
    assert driver.ended["b", 0].cached_tokens == cached_blocks * 4
    driver.assert_answered()


def test_second_request_computes_only_what_is_new():
    driver = Driver(block_size=4)
    driver.submit("a", PROMPT, max_tokens=3)
    driver.run()
    driver.submit("b", [*PROMPT, 50, 51, 52], max_tokens=3)
    driver.run()
    driver.assert_answered()
    assert driver.seated[-1].computed_tokens == driver.ended["b", 0].cached_tokens == 8
    assert driver.instance.stats.cached_tokens == 8


@pytest.mark.parametrize("first", ["running", "ended"])
def test_full_prompt_hit_computes_one_block_and_writes_nothing_shared(first):
    """24. The worker asserts on every write that no other table names the block."""
    driver = Driver(block_size=4)
    driver.submit("a", PROMPT, max_tokens=9)
    driver.step()  # the prompt is computed
    if first == "ended":
        driver.run()
    driver.submit("b", PROMPT, max_tokens=9, seed=1)
    driver.run_until("b", Phase.DECODE)
    a, b = driver.seated
    assert b.computed_tokens == 4, "the last block is computed again: the logits of its last token are stored nowhere"
    assert b.blocks[0] == a.blocks[0]
    assert b.blocks[1] != a.blocks[1]
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_identical_requests_in_flight_fold():
    """25. Both compute; the second to publish takes the first one's blocks; one path in the cache, later hits are right."""
    driver = Driver(start=False, block_size=4)
    for name in "abc":
        driver.submit(name, PROMPT, max_tokens=10)
    driver.restart_worker()
    driver.run_until("c", Phase.DECODE)
    driver.step()
    tables = [driver.sequence(name).blocks for name in "abc"]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 3
    assert driver.instance.stats.folded_blocks == 4
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()
    computed = len(PROMPT) + 10 - 1
    assert len(driver.instance.board.cache) == computed // 4
    assert driver.pool.free == driver.pool.total - computed // 4

    driver.submit("d", [*PROMPT, *driver.heard("a"), 1], max_tokens=4)
    driver.run()
    driver.assert_answered("d")
    assert driver.ended["d", 0].cached_tokens == computed // 4 * 4


def test_fold_is_told_to_the_worker_before_the_block_has_a_new_owner():
    driver = Driver(start=False, block_size=4, blocks=6, slots=3, steps_in_flight=1)
    driver.submit("a", PROMPT, max_tokens=4)
    driver.submit("b", PROMPT, max_tokens=4)
    driver.restart_worker()
    own = driver.sequence("b").blocks[:2]
    driver.submit("c", range(60, 68), max_tokens=4)
    driver.step()
    plan = driver.plans[-1]
    assert [(place, block) for _, place, block in plan.deduplicated] == list(enumerate(driver.sequence("a").blocks[:2]))
    given = [block for new in plan.new for block in new.blocks] + [block for _, block in plan.grown]
    assert any(block in given for block in own), "the copies that b gave back are in use again, in the same plan"
    driver.run()
    driver.assert_answered()


def test_sequence_that_folds_with_its_last_token_is_dropped_and_not_told_of_the_fold():
    driver = Driver(start=False, block_size=4)
    driver.submit("a", PROMPT, max_tokens=1)
    driver.submit("b", PROMPT, max_tokens=1)
    driver.restart_worker()
    driver.run()
    assert driver.instance.stats.folded_blocks == 2
    assert not any(plan.deduplicated for plan in driver.history)
    driver.assert_answered()
    driver.assert_at_rest()


def test_identical_requests_with_equal_outputs_under_preemption():
    """25. Publishing, folding, giving back and hitting again, in every order that two preemptions a step can make."""
    driver = Driver(start=False, block_size=2, blocks=30, slots=3)
    for name in "abc":
        driver.submit(name, PROMPT, max_tokens=12)
    driver.restart_worker()
    for _ in range(12):
        driver.step()
        driver.preempt(2)
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_preempted_request_finds_its_own_blocks_again():
    driver = Driver(block_size=4)
    driver.submit("a", PROMPT, max_tokens=12)
    driver.step(6)
    driver.preempt()
    driver.run()
    driver.assert_answered()
    again = driver.seated[-1]
    computed = len(again.tokens) - 1
    assert again.computed_tokens == computed // 4 * 4
    assert driver.ended["a", 0].cached_tokens == 0, "usage tells what the first admission found"


def test_running_blocks_are_never_evicted():
    """27."""
    driver = Driver(block_size=4)
    driver.submit("old", range(60, 72), max_tokens=4)
    driver.run()
    driver.submit("a", PROMPT, max_tokens=12)
    while driver.plans:
        driver.step()
        driver.dispatch(EvictSome(1000))
    driver.assert_answered()
    driver.assert_at_rest()
    assert len(driver.instance.board.cache) == 0


def test_full_cache_makes_room():
    """27. A pool full of cached blocks is a pool full of available ones."""
    driver = Driver(block_size=4, blocks=6)
    for number in range(12):
        driver.submit(f"r{number}", range(number, number + 13), max_tokens=8)
        driver.run()
    driver.assert_answered()
    driver.assert_at_rest()
    assert driver.instance.board.cache.evicted > 0
    assert driver.instance.stats.preemptions == 0


def test_requests_of_different_salts_share_nothing():
    driver = Driver(start=False, block_size=4)
    driver.submit("a", PROMPT, max_tokens=3, salt=b"tenant 1")
    driver.submit("b", PROMPT, max_tokens=3, salt=b"tenant 2")
    driver.restart_worker()
    driver.run()
    driver.submit("c", PROMPT, max_tokens=3)
    driver.run()
    assert [driver.ended[name, 0].cached_tokens for name in "abc"] == [0, 0, 0]
    assert driver.instance.stats.folded_blocks == 0
    driver.assert_answered()


def test_without_prefix_caching_only_siblings_share():
    driver = Driver(start=False, block_size=4, prefix_caching=False)
    driver.submit("a", PROMPT, max_tokens=3, n=2)
    driver.submit("b", PROMPT, max_tokens=3)
    driver.restart_worker()
    driver.run()
    driver.submit("c", PROMPT, max_tokens=3)
    driver.run()
    assert [driver.ended[key].cached_tokens for key in (("a", 0), ("a", 1), ("b", 0), ("c", 0))] == [0, 4, 0, 0]
    driver.assert_answered()


def test_without_prefix_caching_a_reused_id_shares_nothing():
    driver = Driver(block_size=4, prefix_caching=False)
    driver.submit("a", PROMPT, max_tokens=3)
    driver.run()
    driver.submit("a", PROMPT, max_tokens=3)
    driver.run()
    assert driver.ended["a", 0].cached_tokens == 0


def test_chunks_are_cached_as_they_are_computed():
    """A long prompt that is still being computed is already useful to the next one."""
    driver = Driver(block_size=4, chunk_tokens_max=4)
    driver.submit("a", range(40), max_tokens=2)
    driver.step(5)
    driver.submit("b", range(40), max_tokens=2)
    driver.run()
    assert driver.ended["b", 0].cached_tokens >= 16
    driver.assert_answered()


def test_a_worker_with_other_weights_finds_nothing_of_the_old_ones():
    """The pool is the same, the content is not what the new worker would compute: every key has another root."""
    driver = Driver(blocks=16, block_size=4, chunk_tokens_max=4)
    driver.submit("a", prompt=range(9), max_tokens=4)
    driver.run()
    driver.submit("b", prompt=range(30), max_tokens=8)
    driver.step(3)
    old = list(driver.sequence("b").keys)
    assert not driver.sequence("b").outputs
    driver.lose_worker("killed")
    driver.worker.memory.clear()
    driver.restart_worker(pool_kept=True, fingerprint=b"other weights")
    driver.run()
    assert not {*old} & {*driver.sequence("b").keys}
    assert driver.instance.fingerprint == b"other weights"
    hasher, expected = BlockHasher(b"other weights", 4), []
    hasher.extend(expected, hasher.root(b""), driver.sequence("b").tokens, len(driver.sequence("b").keys))
    assert driver.sequence("b").keys == expected


def test_an_answer_does_not_go_on_with_other_weights():
    """Found by an audit: the model's files were replaced, the worker was killed, and the answer went on as another one's."""
    driver = Driver(blocks=32, block_size=4)
    driver.submit("begun", prompt=range(9), max_tokens=8)
    driver.submit("two", prompt=range(20, 29), max_tokens=8, n=2)
    driver.step(3)
    driver.lose_worker("killed")
    driver.submit("new", prompt=range(9), max_tokens=3)
    driver.worker.memory.clear()
    driver.restart_worker(fingerprint=b"other weights")
    for key in (("begun", 0), ("two", 0), ("two", 1)):
        assert (driver.ended[key].reason, driver.ended[key].error) == (FinishReason.ERROR, "worker_gone")
        assert "other weights" in driver.ended[key].detail
    driver.run()
    assert driver.ended["new", 0].reason is FinishReason.LENGTH


def test_a_worker_with_the_same_weights_finds_what_the_pool_holds():
    driver = Driver(blocks=16, block_size=4)
    driver.submit("a", prompt=range(9), max_tokens=4)
    driver.run()
    driver.lose_worker("killed")
    driver.restart_worker(pool_kept=True)
    driver.submit("b", prompt=range(9), max_tokens=4)
    driver.run()
    assert driver.ended["b", 0].cached_tokens == 8
