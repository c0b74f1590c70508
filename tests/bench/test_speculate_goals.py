"""Which goals the benchmarks of drafts, on a GPU and on a CPU, find met, from their own figures."""

import pytest

pytest.importorskip("torch")

import speculate
from speculate_gpu import Row, goals


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
