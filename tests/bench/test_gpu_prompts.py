"""The load of `bench/gpu.py --only prompts` with a tiny model on the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "worker"))

from rig import TINY, make_pool, make_runner, tiny_model

from gpu_prompts import PrefillRun, load_rows


@pytest.fixture(scope="module")
def runner():
    model = tiny_model(replace(TINY, context_tokens_max=256), compute="native")
    made = make_runner(model, make_pool(model, blocks=64, block_size=16), slots=8)
    yield made
    made.close()


def widest(runner, at_once: int) -> int:
    """The most prompts of one step."""
    run, seen = PrefillRun(runner, [[2 + number] * 100 for number in range(5)], at_once, tokens_per_step=32), []
    submit = runner.submit
    runner.submit = lambda plan: seen.append(len(plan.run.slots)) or submit(plan)
    try:
        run.seconds()
    finally:
        del runner.submit
    assert sorted(run.ended) == list("01234")
    return max(seen)


def test_prompts_share_steps_only_where_several_may(runner):
    """One prompt ends and the next one begins in the same step."""
    assert widest(runner, 1) == 2
    assert widest(runner, 4) > 2


def test_a_row_says_whether_the_goal_is_met(runner):
    row = load_rows(runner, TINY.vocab_size, 100, 3, turns=1, tokens_per_step=32)
    assert (row["tokens"], row["prompts"]) == (100, 3)
    assert min(int(row["steps_1"]), int(row["steps_4"])) >= 10, "of at most 32 tokens each"
    assert str(row["goal"]).startswith(("passed", "missed"))
