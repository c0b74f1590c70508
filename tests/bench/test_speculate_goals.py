"""Which goals the benchmarks of drafts, on a GPU and on a CPU, find met, from their own figures."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")

import speculate
from speculate_gpu import Bench, Chance, Measured, Row, goals


def test_goals_are_judged_by_the_figures_that_are_there():
    good = [Row(1, 0.75, 1.02, 2.3), Row(64, 0.25, None, 0.98), Row(64, None, None, 0.97)]
    assert [line.partition(":")[0] for line in goals(good)] == ["met", "met", "met"]
    bad = [Row(1, 0.75, 0.8, 1.9), Row(64, None, None, 0.96)]
    assert [line.partition(":")[0] for line in goals(bad)] == ["missed", "missed", "missed"]
    assert [line.partition(":")[0] for line in goals([Row(4, 1.0, None, 2.0)])] == ["not judged", "not judged", "met"]
    assert goals(bad)[1] == "missed: 1 at once, 75 % right: at least 2x (1.90 to 1.90)"


def test_goals_of_a_cpu():
    good = {("copy", 1): 1.31, ("json", 1): 1.5, ("chat", 16): 0.97}
    assert [line.partition(":")[0] for line in speculate.goals(good, arm=False)] == ["met", "met", "met"]
    bad = {("copy", 1): 1.25, ("json", 1): 1.22, ("chat", 16): 0.92}
    assert [line.partition(":")[0] for line in speculate.goals(bad, arm=False)] == ["missed", "missed", "missed"]
    assert speculate.goals(bad, arm=True)[0] == "met: copying, 1 at once: at least 1.2x (1.25 to 1.25)"
    assert [line.partition(":")[0] for line in speculate.goals({("copy", 4): 1.0}, arm=False)] == [
        "not judged",
        "not judged",
        "met",
    ]


def test_a_prediction_has_the_steps_that_ran():
    """Short answers end in steps with fewer rows: they cost less, and have fewer drafts that could be right."""
    bench = Bench.__new__(Bench)
    bench.rates = dict.fromkeys((1, 2, 4, 5), 0.0)
    bench.step_seconds = {1: 0.25, 2: 0.5, 4: 1.0, 5: 2.0}
    assert bench.predicted(Measured(tokens=13, steps=[5, 5, 3, 2, 1]), 5) == 13 / (2.0 + 2.0 + 1.0 + 0.5 + 0.25)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_as_many_drafts_are_right_as_their_share_says(share):
    """Also in a few dozen steps: of independent draws, 40 often have a tenth more or fewer right drafts."""
    chance = Chance(share)
    right = sum(chance.leading(4) for _ in range(40)) / 40
    assert right == pytest.approx(sum(share**place for place in range(1, 5)), abs=0.1)
