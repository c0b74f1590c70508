"""Which goals the benchmark of drafts on a GPU finds met, from its own figures."""

import pytest

pytest.importorskip("torch")

from speculate_gpu import Row, goals


def test_goals_are_judged_by_the_figures_that_are_there():
    good = [Row(1, 0.75, 1.02, 2.3), Row(64, 0.25, None, 0.98), Row(64, None, None, 0.97)]
    assert [line.partition(":")[0] for line in goals(good)] == ["met", "met", "met"]
    bad = [Row(1, 0.75, 0.8, 1.9), Row(64, None, None, 0.96)]
    assert [line.partition(":")[0] for line in goals(bad)] == ["missed", "missed", "missed"]
    assert [line.partition(":")[0] for line in goals([Row(4, 1.0, None, 2.0)])] == ["not judged", "not judged", "met"]
    assert goals(bad)[1] == "missed: 1 at once, 75 % right: at least 2x (1.90 to 1.90)"
