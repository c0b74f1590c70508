"""With its first token a client learns how much of its prompt was cached, and the front how long the prefill took."""

from __future__ import annotations

from .harness import Driver


def test_the_first_token_comes_with_what_was_cached():
    driver = Driver()
    driver.submit("a", prompt=range(9), max_tokens=3)
    driver.run()
    driver.submit("b", prompt=range(9), max_tokens=3, n=2)
    driver.step()
    assert driver.begun["b", 0].cached_tokens == 8
    driver.run()
    assert [driver.begun[name].cached_tokens for name in (("a", 0), ("b", 0), ("b", 1))] == [0, 8, 8]
    assert all(driver.begun[name].cached_tokens == driver.ended[name].cached_tokens for name in driver.begun)


def test_prefill_begins_with_the_first_admission_and_not_with_the_arrival():
    driver = Driver(slots=1)
    driver.submit("a", prompt=range(4), max_tokens=2)
    driver.submit("b", prompt=range(4, 9), max_tokens=2)
    driver.advance(5.0)
    while ("b", 0) not in driver.begun:
        driver.advance(0.25)
        driver.step()
    assert 0.0 < driver.begun["b", 0].prefill_seconds <= 1.0, "5 seconds in the queue are not prefill"
    assert driver.begun["a", 0].prefill_seconds >= 5.0, "it was admitted at once"
