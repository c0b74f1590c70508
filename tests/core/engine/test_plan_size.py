"""What is said once per request is in a plan once, and no plan is larger than a frame."""

from baton.core.engine import admission
from baton.core.engine.admission import new_bytes
from baton.protocol.codec import FRAME_BYTES_MAX, encode
from baton.protocol.request import Refused, SamplingParams

from .harness import Driver

WORDS = tuple((place % 50, 1 + place % 7) for place in range(2000))
"""4,000 tokens of bad words: what one request may have."""


def plans(driver: Driver, steps_max: int = 400) -> list:
    """All plans until nothing is left to do."""
    seen = []
    for _ in range(steps_max):
        if not driver.plans:
            return seen
        seen.append(driver.plans[0])
        driver.step()
    raise AssertionError("the driver does not come to rest")


def test_sequences_of_one_request_share_one_row_of_settings():
    driver = Driver(blocks=256, block_size=4, slots=64, tokens_per_step=1024, steps_in_flight=1)
    driver.submit("a", range(8), n=16, max_tokens=2, bad_words=WORDS)
    seen = plans(driver)
    crowd = max(seen, key=lambda plan: len(plan.new))
    assert len(crowd.new) == 15, "the siblings come together, when the leader's prompt is there"
    assert len(crowd.sampling) == 1
    assert {new.sampling for new in crowd.new} == {0}
    driver.assert_answered()


def test_prompts_of_one_list_share_one_row_though_their_max_tokens_differ():
    driver = Driver(blocks=256, block_size=4, slots=64, tokens_per_step=1024, steps_in_flight=1)
    driver.submit("first", [9], max_tokens=1)  # its step is out while the others come
    for number in range(32):
        driver.submit(f"p{number}", range(number + 1), max_tokens=2 + number, bad_words=WORDS)
    seen = plans(driver)
    crowd = max(seen, key=lambda plan: len(plan.new))
    assert len(crowd.new) == 32
    assert len(crowd.sampling) == 1
    assert len(encode(crowd)) < 2 * admission.sampling_bytes(crowd.sampling[0])
    driver.assert_answered()


def test_different_settings_have_rows_of_their_own():
    driver = Driver(blocks=64, block_size=4, slots=8, tokens_per_step=64, steps_in_flight=1)
    driver.submit("first", [9], max_tokens=1)
    for number in range(4):
        driver.submit(f"p{number}", [1, 2], max_tokens=3, seed=number // 2)
    crowd = max(plans(driver), key=lambda plan: len(plan.new))
    assert [new.sampling for new in crowd.new] == [0, 0, 1, 1]
    assert [row.seed for row in crowd.sampling] == [0, 1]
    driver.assert_answered()


def test_a_plan_that_would_be_too_large_is_split():
    driver = Driver(new_bytes_max=40_000, blocks=512, block_size=4, slots=64, tokens_per_step=4096, steps_in_flight=1)
    driver.submit("first", [9], max_tokens=1)
    for number in range(12):
        words = tuple((number, *word) for word in WORDS[:1000])  # about 20 kB each, all different
        driver.submit(f"p{number}", range(number + 1), max_tokens=2, bad_words=words)
    seen = plans(driver)
    assert max(len(encode(plan)) for plan in seen) <= 40_000
    assert sum(1 for plan in seen if plan.new) >= 7
    assert driver.instance.stats.held_back["plan"] > 0
    driver.assert_answered()
    driver.assert_at_rest()


def test_one_sequence_larger_than_the_bound_still_goes_alone():
    driver = Driver(new_bytes_max=100, blocks=64, block_size=4, slots=8, tokens_per_step=256, steps_in_flight=1)
    for number in range(4):
        driver.submit(f"p{number}", range(20), max_tokens=2)
    assert max(len(plan.new) for plan in plans(driver)) == 1
    driver.assert_answered()


def test_a_request_that_no_plan_can_carry_is_refused_with_the_numbers():
    driver = Driver(blocks=4000, block_size=2048)
    driver.submit("a", range(3), max_tokens=5_000_000)
    refused = driver.refused["a"]
    assert refused == Refused("never_planned", new_bytes(5_000_003, SamplingParams()), FRAME_BYTES_MAX // 2)
    assert str(refused.needed) in str(refused)


def test_the_bound_of_bytes_is_never_below_what_a_plan_has():
    driver = Driver(blocks=256, block_size=1, slots=16, tokens_per_step=4096, steps_in_flight=1)
    driver.submit(
        "a", [40] * 100, max_tokens=2, bad_words=WORDS, logit_bias=((2**31 - 1, 1.5),) * 1024, stop_token_ids=(7,) * 99
    )
    (plan,) = [plan for plan in plans(driver) if plan.new]
    assert len(encode(plan)) <= new_bytes(100, plan.sampling[0]) < driver.config.scheduler.new_bytes_max
