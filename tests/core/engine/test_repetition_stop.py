"""An answer that repeats itself ends at the same token, whatever happens to it on the way."""

from __future__ import annotations

from random import Random

import pytest

from baton.protocol.repetition import RepetitionStop

from .harness import Driver, make_request, repeats, undisturbed
from .pair import Pair

RULE = RepetitionStop(pattern_max=4, count_min=3, tokens_min=10)
ASKED = {"max_tokens": 60, "top_k": 2, "repetition_stop": RULE}


def seeds(count: int, least: int = 12, **more) -> list[int]:
    """Seeds of requests whose answers repeat themselves after some tokens."""
    found = []
    for seed in range(2000):
        request = make_request("?", seed=seed, **(ASKED | more))
        answer = undisturbed(request)
        if least <= len(answer) < 60 and repeats(request, answer):
            found.append(seed)
        if len(found) == count:
            return found
    raise AssertionError(f"only {len(found)} of {count} answers repeat themselves")


def test_it_ends_where_it_repeats_itself():
    driver = Driver(slots=8, blocks=256)
    for seed in seeds(6):
        driver.submit(f"r{seed}", seed=seed, **ASKED)
    driver.run()
    driver.assert_answered()
    assert {end.reason.value for end in driver.ended.values()} == {"repetition"}
    driver.assert_at_rest()


def test_without_the_rule_it_goes_on():
    driver = Driver()
    driver.submit("a", seed=seeds(1)[0], **{**ASKED, "repetition_stop": None})
    driver.run()
    assert (len(driver.heard("a")), driver.reason("a")) == (60, "length")


def test_the_prompt_does_not_count():
    driver = Driver()
    driver.submit(
        "a", [1] * 30, max_tokens=12, top_k=1, repetition_stop=RepetitionStop(pattern_max=1, count_min=3, tokens_min=8)
    )
    driver.run()
    assert (driver.heard("a"), driver.reason("a")) == ([0] * 8, "repetition")


@pytest.mark.parametrize("least", [0, 1, 8, 9, 11, 12])
def test_not_before_min_tokens(least):
    driver = Driver()
    rule = RepetitionStop(pattern_max=1, count_min=3, tokens_min=8)
    driver.submit("a", max_tokens=12, min_tokens=least, top_k=1, repetition_stop=rule)
    driver.run()
    assert (len(driver.heard("a")), driver.reason("a")) == (max(8, least), "repetition")


@pytest.mark.parametrize("delivered", ["none", "some", "all but one", "all"])
def test_a_replay_ends_at_the_same_token(delivered):
    """Only output tokens of earlier attempts and of this one decide, whoever computed them."""
    driver = Driver(slots=8, blocks=256)
    answers = {f"r{seed}": (seed, undisturbed(make_request("?", seed=seed, **ASKED))) for seed in seeds(6)}
    for name, (seed, answer) in answers.items():
        known = {"none": 0, "some": len(answer) // 2, "all but one": len(answer) - 1, "all": len(answer)}[delivered]
        driver.submit(name, seed=seed, attempt=2, outputs=(tuple(answer[:known]),), **ASKED)
    driver.run()
    for name, (_, answer) in answers.items():
        assert (driver.heard(name), driver.reason(name)) == (answer, "repetition")
    driver.assert_at_rest()


def test_preemptions_and_lost_workers_move_nothing():
    driver, rng = Driver(slots=4, blocks=40, steps_in_flight=3), Random(3)
    for seed in seeds(8):
        driver.submit(f"r{seed}", seed=seed, n=2, **ASKED)
    for turn in range(60):
        driver.step()
        if rng.random() < 0.3:
            driver.preempt(rng.randint(1, 3))
        if turn % 20 == 19:
            driver.lose_worker("killed")
            driver.restart_worker(pool_kept=rng.random() < 0.5)
    driver.run()
    driver.assert_answered()
    assert "repetition" in {end.reason.value for end in driver.ended.values()}


def test_an_answer_that_is_handed_over_ends_at_the_same_token():
    pair = Pair()
    names = [f"r{seed}" for seed in seeds(4)]
    for name in names:
        pair.start(name, range(9), seed=int(name[1:]), **ASKED)
    pair.run()
    pair.assert_answered(*names)


def test_a_repetition_that_the_first_token_completes_is_not_handed_over():
    """Its length is that of the prefill leg, not of the answer."""
    pair = Pair()
    routed = pair.start(
        "a", range(9), max_tokens=20, top_k=1, repetition_stop=RepetitionStop(pattern_max=1, count_min=2, tokens_min=0)
    )
    pair.run()
    pair.assert_answered("a")
    assert (routed.tokens[0], routed.ended[0].reason.value) == ([0, 0], "repetition")
    pair.assert_at_rest()


def test_the_worker_does_not_get_the_rule():
    """Only the scheduler needs it: requests that differ in it share their settings on the wire."""
    driver = Driver()
    driver.submit("a", **ASKED)
    assert [settings.repetition_stop for plan in driver.history for settings in plan.sampling] == [None]
