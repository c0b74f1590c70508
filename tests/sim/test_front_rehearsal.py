"""`baton serve` rehearsed: engines are lost, freeze and come back, also with other weights, while clients leave."""

from __future__ import annotations

from collections import Counter

import pytest

from baton.sim.generate_front import generate_front
from baton.sim.run import run
from baton.sim.sometimes import FRONT_SOMETIMES


def rehearse(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        outcome = run(generate_front(seed))
        assert outcome.invariant is None, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.sometimes)
    return seen


def test_a_lost_engine_takes_no_answer_with_it():
    seen = rehearse(range(80))
    assert [state for state in FRONT_SOMETIMES if not seen[state]] == []


@pytest.mark.slow
def test_a_lost_engine_takes_no_answer_with_it_in_many_runs():
    rehearse(range(80, 3_000))


def test_a_run_is_determined_by_its_seed():
    assert run(generate_front(3)).digest == run(generate_front(3)).digest
