"""What clients get when nothing goes wrong: every token, once, and the right end."""

import pytest

from baton.core.engine.phase import Phase
from baton.core.events import StepDone
from baton.protocol.step import RowFailure, StepResult

from .harness import VOCAB, Driver, make_request, stop_at, undisturbed


def test_token_zero_and_every_other_id_reach_the_client():
    """8."""
    driver = Driver()
    first = undisturbed(make_request("?", max_tokens=1))[0]
    for token in range(VOCAB):
        driver.submit(f"wants {token}", max_tokens=1, seed=token - first)
    driver.run()
    assert [driver.heard(f"wants {token}") for token in range(VOCAB)] == [[token] for token in range(VOCAB)]


def test_max_tokens_ends_it():
    driver = Driver()
    driver.submit("a", max_tokens=7)
    driver.run()
    assert len(driver.heard("a")) == 7
    assert driver.reason("a") == "length"
    driver.assert_at_rest()


def test_one_token_is_enough():
    driver = Driver(blocks=1)
    driver.submit("a", range(4), max_tokens=1)  # the only token is sampled and never fed back: one block is enough
    driver.run()
    driver.assert_answered()
    assert driver.ended["a", 0].output_tokens == 1


def test_stop_token_is_delivered_and_ends_it():
    driver = Driver()
    driver.submit("a", max_tokens=20, stop_token_ids=(stop_at(5),))
    driver.run()
    assert len(driver.heard("a")) == 6
    assert driver.reason("a") == "stop"
    driver.assert_answered()


def test_tokens_in_flight_after_a_stop_are_never_sent():
    driver = Driver(steps_in_flight=4)
    driver.submit("a", max_tokens=20, stop_token_ids=(stop_at(2),))
    for _ in range(4):
        driver.execute()
    assert [result.values for result in driver.results] == [(token,) for token in undisturbed(make_request("?", max_tokens=4))]
    driver.run()
    assert len(driver.heard("a")) == 3
    driver.assert_at_rest()


def test_min_tokens_keeps_a_stop_token_from_ending_it():
    driver = Driver()
    early, late = stop_at(1), stop_at(6)
    driver.submit("a", max_tokens=20, stop_token_ids=(early, late), min_tokens=3)
    driver.run()
    assert len(driver.heard("a")) == 7
    assert driver.reason("a") == "stop"
    driver.assert_answered()


def test_stop_id_in_the_prompt_is_not_a_stop():
    driver = Driver()
    driver.submit("a", (9, 9, 9), max_tokens=3, stop_token_ids=(9,))
    assert 9 not in undisturbed(driver.requests["a"])
    driver.run()
    driver.assert_answered()
    assert driver.reason("a") == "length"


def test_decode_gets_its_next_block_before_it_writes_past_the_last():
    """16. Every block is given in the plan that first writes to it, not later and not earlier."""
    driver = Driver(block_size=4)
    driver.submit("a", range(4), max_tokens=10)  # positions 0 to 12 are computed: 4 blocks
    driver.run()
    driver.assert_answered()
    grown_in = [plan.step for plan in driver.history if plan.grown]
    assert grown_in == [2, 6, 10]  # step 1 computes positions 0 to 3, step 2 position 4, ...


def test_last_token_needs_no_block():
    driver = Driver(block_size=4, blocks=2)
    driver.submit("a", range(4), max_tokens=5)  # 9 tokens, of which 8 are computed
    driver.run()
    driver.assert_answered()
    assert sum(plan.tokens for plan in driver.history) == 8
    assert driver.instance.stats.preemptions == 0


# Budget and chunks


def test_budget_of_a_step_is_used_up_and_never_exceeded():
    """18. The harness asserts the upper bound on every plan of every test."""
    driver = Driver(start=False, tokens_per_step=8, slots=4)
    for name, first in zip("abcd", range(0, 40, 10), strict=True):
        driver.submit(name, range(first, first + 5), max_tokens=6)
    driver.restart_worker()
    driver.run()
    assert [plan.tokens for plan in driver.history[:3]] == [8, 8, 8]
    driver.assert_answered()


def test_decoding_sequences_come_before_prompts_in_the_budget():
    driver = Driver(tokens_per_step=4, slots=3)
    driver.submit("a", (1, 2, 3), max_tokens=12)
    driver.submit("b", (4, 5, 6), max_tokens=12)
    driver.run_until("b", Phase.DECODE)
    driver.submit("c", range(10, 20), max_tokens=3)
    begin = len(driver.history)
    driver.run_until("c", Phase.DECODE)
    while_prefilling = driver.history[begin : begin + 4]
    assert [sorted(plan.run.counts) for plan in while_prefilling] == [[1, 1, 2]] * 4
    driver.run()
    driver.assert_answered()


def test_prompts_have_the_whole_step_where_nothing_decodes_and_keep_to_their_bound_beside_decodes():
    driver = Driver(start=False, tokens_per_step=16, slots=4, prefill_tokens_beside_decodes=3, prompts_at_once=1)
    driver.submit("a", range(20), max_tokens=30)
    driver.submit("b", range(30, 42), max_tokens=30)
    driver.submit("c", range(50, 60), max_tokens=3)
    driver.restart_worker()
    driver.run()
    counts = [plan.run.counts for plan in driver.history]
    assert counts[:2] == [(16,), (4, 12)]
    assert counts[2:6] == [(1, 1, 3), (1, 1, 3), (1, 1, 3), (1, 1, 1)]
    driver.assert_answered()


@pytest.mark.parametrize("bound", [1, 2, 5])
def test_all_prompts_together_keep_to_the_bound_beside_decodes(bound):
    driver = Driver(tokens_per_step=16, slots=4, prefill_tokens_beside_decodes=bound)
    driver.submit("a", (1, 2, 3), max_tokens=40)
    driver.run_until("a", Phase.DECODE)
    for name, first in (("b", 10), ("c", 30)):
        driver.submit(name, range(first, first + 6), max_tokens=1)
    begin = len(driver.history)
    driver.run_until("a", Phase.CLOSING)
    assert max(plan.tokens for plan in driver.history[begin:]) == 1 + bound
    driver.run()
    driver.assert_answered()


def test_chunked_prefill_gives_the_same_output():
    """6, chunked. A chunk that is not the last answers no token, and the last one answers a token."""
    driver = Driver(chunk_tokens_max=3, steps_in_flight=4)
    driver.submit("a", range(10), max_tokens=4)
    values = [driver.execute().values for _ in range(4)]
    assert [plan.run.counts for plan in driver.history[:4]] == [(3,), (3,), (3,), (1,)]
    assert values[:3] == [()] * 3
    assert values[3] == tuple(undisturbed(driver.requests["a"])[:1])
    driver.run()
    driver.assert_answered()


@pytest.mark.parametrize("prompt_tokens", [7, 8, 9])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 9])
def test_chunk_block_and_prompt_ends_may_coincide(prompt_tokens, chunk):
    driver = Driver(chunk_tokens_max=chunk, block_size=4)
    driver.submit("a", range(prompt_tokens), max_tokens=9)
    driver.submit("b", range(prompt_tokens), max_tokens=9, seed=1)
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


# n sequences of one prompt


def test_n_sequences_share_the_prompt_blocks():
    driver = Driver(block_size=4, slots=3)
    driver.submit("a", range(9), max_tokens=3, n=3)
    driver.run_until("a", Phase.DECODE, index=2)
    tables = [driver.sequence("a", index).blocks for index in range(3)]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 3
    assert len({table[2] for table in tables}) == 3, "the last, partial block is everybody's own"
    assert driver.pool.free == driver.pool.total - 2 - 3
    driver.run()
    driver.assert_answered()
    assert len({tuple(driver.heard("a", index)) for index in range(3)}) == 3, "each draws for itself"
    assert [driver.ended["a", index].cached_tokens for index in range(3)] == [0, 8, 8]


def test_siblings_wait_until_the_leader_has_computed_the_prompt():
    driver = Driver(chunk_tokens_max=4)
    driver.submit("a", range(9), max_tokens=5, n=2)
    for _ in range(3):  # three chunks
        assert driver.phase("a", 1) is Phase.HELD
        driver.step()
    assert driver.phase("a", 1) is Phase.DECODE  # one token is left to compute, which one plan does
    driver.run()
    driver.assert_answered()


@pytest.mark.parametrize("end", [{"max_tokens": 1}, {"stop_token_ids": (stop_at(0),)}])
def test_siblings_go_on_when_the_leader_ends_with_its_first_token(end):
    driver = Driver()
    driver.submit("a", n=3, **end)
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_more_sequences_than_slots_take_turns():
    driver = Driver(slots=2)
    driver.submit("a", range(5), max_tokens=6, n=7)
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_failed_row_ends_its_sequence_and_no_other():
    driver = Driver()
    driver.submit("a", max_tokens=9)
    driver.submit("b", (7, 8, 9), max_tokens=9)
    driver.run_until("b", Phase.DECODE)
    whole, assign_slot = driver.execute(), driver.sequence("a")
    place = whole.slots.index(assign_slot.slot)
    rows = [(*row[:2], ()) if number == place else row for number, row in enumerate(whole.rows)]
    failure = RowFailure(assign_slot.slot, assign_slot.incarnation, "NaN in the logits")
    driver.results.clear()
    driver.dispatch(StepDone(StepResult.of(whole.step, whole.epoch, rows, (failure,))))
    assert driver.reason("a") == "error"
    assert driver.ended["a", 0].detail == "NaN in the logits"
    driver.run()
    driver.assert_answered("b")
    driver.assert_at_rest()


# Log-probabilities


def test_logprobs_come_with_their_tokens():
    """Each once and in order, preemptions or not; the one who did not ask is told nothing."""
    driver = Driver()
    driver.submit("a", max_tokens=9, logprobs=2)
    driver.submit("b", (7, 8), max_tokens=9)
    while driver.plans:
        driver.step()
        assert [one.sampled.token for one in driver.logprobs.get(("a", 0), [])] == driver.heard("a")
        if len(driver.heard("a")) == 4:
            driver.preempt(2)
    driver.assert_answered()
    assert ("b", 0) not in driver.logprobs


def test_logprobs_of_tokens_after_the_end_are_not_told():
    driver = Driver(steps_in_flight=4)
    driver.submit("a", max_tokens=20, stop_token_ids=(stop_at(2),), logprobs=0)
    driver.run()
    assert [one.sampled.token for one in driver.logprobs["a", 0]] == driver.heard("a")
    assert len(driver.heard("a")) == 3


@pytest.mark.parametrize("n", [1, 3])
def test_prompt_logprobs_compute_the_whole_prompt_whatever_is_cached(n):
    driver = Driver(block_size=4, chunk_tokens_max=5)
    driver.submit("first", range(12), max_tokens=2)
    driver.run()
    driver.submit("a", range(12), max_tokens=5, prompt_logprobs=0, n=n)
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()
    told = [(one.prompt_from + place, p.token) for one in driver.logprobs["a", 0] for place, p in enumerate(one.prompt)]
    assert told == list(enumerate(range(12)))
    assert [driver.ended["a", index].cached_tokens for index in range(n)] == [0, 8, 8][:n], "its siblings find it"
    assert len(driver.instance.board.cache) == (12 + 5 - 1) // 4 * n - 3 * (n - 1), "the prompt is cached once"
