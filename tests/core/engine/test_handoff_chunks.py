"""Chunks of a prompt that is handed over: an eighth of it, unless steps of that size are slow."""

from __future__ import annotations

from random import Random

import pytest

from baton.core.engine.handoff_chunks import AGAIN, HandoffChunks


def learned(cost: float, price: float = 1e-5, least: int = 512) -> HandoffChunks:
    """Steps of all sizes were measured; each takes `cost` seconds and `price` per token."""
    chunks = HandoffChunks(least)
    for tokens in (512, 1024, 2048, 4096, 8192):
        chunks.step_done(tokens, cost + price * tokens)
    return chunks


@pytest.mark.parametrize(
    ("tokens", "size"), [(1024, 512), (4096, 512), (5000, 625), (8192, 1024), (16384, 2048), (100, 100), (1023, 1023)]
)
def test_an_eighth_and_at_least_512(tokens: int, size: int):
    """A prompt below two chunks is computed whole."""
    assert learned(cost=0.0).size(tokens) == size


def naive(cost: float, price: float, tokens: int) -> int:
    """The smallest size of the doubling row whose price per token is within 3 % of the best larger one."""
    size = max(512, -(-tokens // 8))
    measured = [512, 1024, 2048, 4096, 8192]
    while 2 * size <= tokens:
        mine = next(one for one in measured if one.bit_length() == size.bit_length())
        larger = [cost / one + price for one in measured if one.bit_length() > size.bit_length()]
        if larger and cost / mine + price <= 1.03 * min(larger):
            return size
        size *= 2
    return size


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_size_that_costs_at_most_three_percent(seed: int):
    random = Random(seed)
    for _ in range(50):
        cost, price, tokens = (
            random.choice((0.0, 1e-4, 5e-4, 2e-3, 2e-2)),
            random.uniform(1e-6, 1e-3),
            random.randrange(1024, 9000),
        )
        assert learned(cost, price).size(tokens) == naive(cost, price, tokens), (cost, price, tokens)


def test_nothing_is_known_at_first_so_a_large_step_is_measured_then_a_small_one():
    chunks = HandoffChunks(512)
    assert chunks.size(4096) == 4096
    chunks.step_done(4096, 0.1)
    assert chunks.size(4096) == 512, "not measured yet: it is tried"
    chunks.step_done(512, 0.022)
    assert chunks.size(4096) == 1024, "a step of 512 takes three quarters more per token"
    chunks.step_done(1024, 0.0255)
    assert chunks.size(4096) == 1024, "within 3 %"


def test_a_size_that_was_slow_is_measured_again():
    chunks = learned(cost=0.02)
    sizes = [chunks.size(8192) for _ in range(2 * AGAIN)]
    assert sizes.count(1024) == 2
    assert set(sizes) == {1024, 8192}
