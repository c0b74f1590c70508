"""bench/simulator.py and bench/large_moe.py with --goals: bounds that are met and missed."""

from __future__ import annotations

import sys

import pytest

import large_moe
import simulator


@pytest.mark.parametrize(
    ("seconds", "events", "count"), [(119.0, 15_001.0, 0), (121.0, 15_001.0, 1), (10.0, 14_000.0, 1), (300.0, 1.0, 2)]
)
def test_goals_of_the_simulator(seconds, events, count):
    assert len(simulator.missed(seconds, events)) == count


@pytest.mark.parametrize(("goals", "status"), [([], 0), (["--goals"], 1)])
def test_a_slow_simulator_ends_with_1_if_goals_count(goals, status, monkeypatch, capsys):
    monkeypatch.setattr(simulator, "measure", lambda what, scenario: (130.0, 20_000.0))
    monkeypatch.setattr(sys, "argv", ["simulator.py", "--requests", "1", *goals])
    assert simulator.main() == status
    assert ("MISSED: 130.0 s of CPU" in capsys.readouterr().out) is bool(status)


@pytest.mark.parametrize(("gib", "goals", "status"), [(20.3, ["--goals"], 0), (22.4, ["--goals"], 1), (22.4, [], 0)])
def test_the_goal_of_memory_of_a_large_mixture(gib, goals, status, monkeypatch, tmp_path, capsys):
    (tmp_path / "qwen3-30b-a3b.48-layers.Q4_K_M.gguf").touch()
    monkeypatch.setattr(large_moe, "served", lambda path, threads: {"memory_gib": gib})
    monkeypatch.setattr(sys, "argv", ["large_moe.py", "--folder", str(tmp_path), *goals])
    assert large_moe.main() == status
    assert ("MISSED: 24.1 GB" in capsys.readouterr().out) is bool(status)
