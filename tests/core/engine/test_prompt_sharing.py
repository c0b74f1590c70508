"""Prompts and urgency: a more urgent prompt comes before the next chunk of a less urgent one; prompts of a class share."""

import pytest

from baton.core.engine.phase import Phase
from baton.core.engine.sharing import divide

from .harness import Driver


def steps_until_admitted(driver: Driver, name: str, limit: int = 50) -> int:
    """Plans that the worker executes before the sequence is on it."""
    for steps in range(limit):
        if driver.sequence(name).phase not in (Phase.WAITING, Phase.HELD):
            return steps
        driver.step()
    raise AssertionError(f"{name} is not admitted within {limit} steps")


def computed(driver: Driver, name: str) -> int:
    return driver.sequence(name).scheduled


def test_an_urgent_prompt_does_not_wait_for_a_long_one_that_is_less_urgent():
    """The urgent request needs one step; the long prompt has forty to go."""
    driver = Driver(blocks=400, block_size=4, tokens_per_step=16, slots=4)
    driver.submit("long", range(700), max_tokens=2, priority=5)
    driver.step()
    driver.submit("urgent", range(1000, 1010), max_tokens=2, priority=-10)
    assert steps_until_admitted(driver, "urgent") <= 2
    assert driver.sequence("long").phase is Phase.PREFILL, "it keeps its slot and its blocks"
    assert driver.instance.stats.preemptions == 0
    driver.run()
    driver.assert_answered()
    driver.assert_at_rest()


def test_a_less_urgent_prompt_gets_what_the_urgent_one_leaves():
    driver = Driver(blocks=400, block_size=4, tokens_per_step=16, slots=4, steps_in_flight=1)
    driver.submit("long", range(700), max_tokens=2, priority=5)
    driver.step()
    before = computed(driver, "long")
    driver.submit("urgent", range(1000, 1010), max_tokens=2, priority=-10)
    driver.step()
    assert (computed(driver, "urgent"), computed(driver, "long") - before) == (10, 6)


def test_several_urgent_prompts_come_in_order_and_before_the_running_class():
    driver = Driver(blocks=400, block_size=4, tokens_per_step=16, slots=8, steps_in_flight=1)
    driver.submit("long", range(700), max_tokens=2, priority=5)
    driver.step()
    for number in range(3):
        driver.submit(f"urgent{number}", range(1000 * number, 1000 * number + 14), max_tokens=2, priority=-number)
    driver.submit("equal", range(5000, 5010), max_tokens=2, priority=5)
    driver.step()
    assert driver.sequence("urgent2").phase is not Phase.WAITING, "the most urgent one comes first"
    driver.run()
    driver.assert_answered()


def test_a_short_prompt_of_the_same_class_does_not_wait_for_a_long_one():
    driver = Driver(blocks=400, block_size=4, tokens_per_step=16, slots=4)
    driver.submit("long", range(700), max_tokens=2)
    driver.step()
    driver.submit("short", range(1000, 1010), max_tokens=2)
    for _ in range(6):
        driver.step()
    assert driver.sequence("short").phase in (Phase.DECODE, Phase.CLOSING, Phase.DONE)
    assert driver.sequence("long").phase is Phase.PREFILL
    driver.run()
    driver.assert_answered()


def test_a_short_prompt_does_not_wait_for_a_long_one_that_waits_before_it():
    driver = Driver(blocks=800, block_size=4, tokens_per_step=16, slots=4)
    driver.submit("long", range(700), max_tokens=2)
    driver.submit("long too", range(2000, 2700), max_tokens=2)
    driver.step()
    driver.submit("short", range(1000, 1010), max_tokens=2)
    for _ in range(10):
        driver.step()
    assert driver.sequence("short").phase in (Phase.DECODE, Phase.CLOSING, Phase.DONE)


def test_with_one_prompt_at_once_a_class_is_computed_in_order():
    driver = Driver(blocks=400, block_size=4, tokens_per_step=16, slots=4, prompts_at_once=1)
    driver.submit("long", range(100), max_tokens=2)
    driver.step()
    driver.submit("short", range(1000, 1010), max_tokens=2)
    for _ in range(3):
        driver.step()
    assert driver.sequence("short").phase is Phase.WAITING


def test_no_more_prompts_are_under_way_than_allowed():
    driver = Driver(blocks=2000, block_size=4, tokens_per_step=16, slots=12, prompts_at_once=3)
    for number in range(10):
        driver.submit(f"long{number}", range(1000 * number, 1000 * number + 300), max_tokens=2)
    for _ in range(20):
        driver.step()
        under_way = sum(s.phase is Phase.PREFILL for s in driver.instance.view.running())
        assert under_way <= 3


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_sharing_leaves_no_prompt_token_of_a_step_unused(at_once):
    """The same prompts take as many steps in any case: what the queue does not use goes back to what runs."""
    driver = Driver(blocks=60, block_size=4, tokens_per_step=16, slots=6, prompts_at_once=at_once, steps_in_flight=1)
    for number in range(8):  # two fit into the pool at a time
        driver.submit(f"r{number}", range(1000 * number, 1000 * number + 96), max_tokens=1)
    steps = 0
    while driver.instance.view.has_work:
        driver.step()
        steps += 1
    assert steps <= 8 * 96 // 16 + 2
    driver.assert_answered()


def test_two_long_prompts_end_one_after_the_other():
    """The second would gain nothing if both were late."""
    driver = Driver(blocks=400, block_size=4, tokens_per_step=16, slots=4, steps_in_flight=1)
    driver.submit("first", range(160), max_tokens=1)
    driver.submit("second", range(1000, 1160), max_tokens=1)
    for _ in range(12):
        driver.step()
    assert driver.sequence("first").phase in (Phase.CLOSING, Phase.DONE), "10 steps alone, one of them shared"
    assert driver.sequence("second").phase is Phase.PREFILL


def test_nobody_is_preempted_for_a_head_whose_tokens_prompts_as_urgent_use():
    """A decoding request of no urgency would lose its place, and the head would wait all the same."""
    driver = Driver(blocks=400, block_size=4, tokens_per_step=16, slots=2, prompts_at_once=1)
    driver.submit("idle", range(4), max_tokens=300, priority=9)
    driver.step()
    driver.step()
    driver.submit("long", range(1000, 1600), max_tokens=2)
    driver.step()
    driver.submit("head", range(2000, 2010), max_tokens=2)
    for _ in range(5):
        driver.step()
    assert driver.instance.stats.preemptions == 0
    assert driver.sequence("idle").phase is Phase.DECODE


@pytest.mark.parametrize(
    ("room", "remaining", "given"),
    [
        (16, [5], [5]),
        (16, [50], [16]),
        (16, [50, 3], [13, 3]),
        (16, [50, 50], [16, 0]),
        (16, [50, 20], [8, 8]),
        (16, [50, 20, 4], [8, 4, 4]),
        (16, [4, 50, 20], [4, 0, 12]),
        (1, [50, 20], [1, 0]),
        (0, [50, 20], [0, 0]),
    ],
)
def test_room_is_divided(room, remaining, given):
    assert divide(room, remaining, remaining) == given


def test_a_bounded_chunk_leaves_its_room_to_the_others():
    assert divide(16, [5, 5, 5], [50, 20, 30]) == [5, 5, 5]
    assert divide(16, [10, 10, 10], [50, 20, 30]) == [8, 8, 0]
