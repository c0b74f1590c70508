"""Prompt tokens beside decodes: as many as the measured price allows, on any machine."""

from __future__ import annotations

import pytest

from baton.config import SchedulerConfig
from baton.core.engine.pace import CHUNK_MIN, FIRST_CHUNK, StepPace


def pace(gap: float | None = 0.025, bound: int = 128) -> StepPace:
    return StepPace(SchedulerConfig(decode_gap_seconds=gap, prefill_tokens_beside_decodes=bound))


def run(each: StepPace, steps: int, *, price: float, decode: float, cost: float = 0.0) -> list[int]:
    """Steps as a worker of this speed would take them, alternating with steps that only decode."""
    chunks = []
    for _ in range(steps):
        each.step_done(0, 1, decode)
        tokens = each.prompt_tokens()
        chunks.append(tokens)
        each.step_done(tokens, 1, decode + cost + price * tokens)
    return chunks


def test_without_a_goal_only_the_fixed_bound_counts():
    each = pace(gap=None)
    run(each, 5, price=1.0, decode=0.1)
    assert each.prompt_tokens() == 128


def test_the_first_chunk_is_careful():
    assert pace().prompt_tokens() == FIRST_CHUNK


@pytest.mark.parametrize("price", [0.0002, 0.0005, 0.001])
def test_a_mixed_step_takes_what_the_goal_says(price):
    each = pace()
    run(each, 50, price=price, decode=0.003)
    tokens = each.prompt_tokens()
    assert tokens % CHUNK_MIN == 0
    assert 0.003 + price * tokens <= 0.025 + 1e-9
    assert tokens == 128 or 0.003 + price * (tokens + CHUNK_MIN) > 0.025 - 1e-9


def test_a_fast_machine_is_bounded_by_the_fixed_bound():
    assert run(pace(), 20, price=1e-6, decode=0.001)[-1] == 128


def test_on_a_slow_machine_prompts_go_on_all_the_same():
    assert run(pace(), 20, price=0.1, decode=0.01)[-1] == CHUNK_MIN


@pytest.mark.parametrize(
    ("decode", "step"),
    [
        pytest.param(0.02, 0.06, id="three times"),
        pytest.param(0.04, 0.09, id="no gap that is seen"),
        pytest.param(0.2, 0.4, id="where every gap is seen: twice"),
    ],
)
def test_where_decoding_alone_takes_longer_than_the_goal_a_step_may_take(decode, step):
    price = 0.0005
    tokens = run(pace(bound=1024), 50, price=price, decode=decode)[-1]
    assert step - price * CHUNK_MIN - 1e-9 <= decode + price * tokens <= step + 1e-9


def test_a_price_that_rises_is_followed_within_two_steps():
    each = pace()
    run(each, 20, price=0.0002, decode=0.003)
    assert 0.003 + 0.0006 * run(each, 3, price=0.0006, decode=0.003)[-1] < 0.030


def test_results_that_come_together_teach_nothing():
    each = pace()
    run(each, 20, price=0.0005, decode=0.003)
    before = each.prompt_tokens()
    each.step_done(128, 1, 0.0)
    assert each.prompt_tokens() == before


@pytest.mark.parametrize("cost", [0.03, 0.1])
def test_a_fixed_cost_above_the_goal_does_not_keep_chunks_at_the_minimum(cost):
    """Whatever the size of the chunk the gap is longer than the goal: prompts get as much time as the cost takes."""
    chunks = run(pace(), 600, price=0.0004, decode=0.003, cost=cost)
    expected = min(128, cost / 0.0004)
    assert chunks[-1] >= expected - 2 * CHUNK_MIN
    assert sum(chunks[-100:]) >= 4 * 100 * CHUNK_MIN


def test_a_fixed_cost_below_the_goal_is_left_out_of_the_price():
    """10 ms whatever the size: what the goal leaves beside it is for tokens."""
    each = pace()
    for _ in range(40):  # prompts end with chunks of any size
        run(each, 3, price=0.0002, decode=0.003, cost=0.008)
        each.step_done(8, 1, 0.003 + 0.008 + 0.0002 * 8)
    tokens = each.prompt_tokens()
    assert 0.003 + 0.008 + 0.0002 * tokens <= 0.025 + 1e-9
    assert tokens >= 48


def test_a_slow_machine_tries_a_larger_chunk_only_now_and_then():
    chunks = run(pace(), 1000, price=0.1, decode=0.01)[2:]
    assert set(chunks) == {CHUNK_MIN, 2 * CHUNK_MIN}
    assert sum(chunk > CHUNK_MIN for chunk in chunks) <= 10
