"""Kept scenarios: each passes on our core, is small, and still finds the bug it was kept for."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from baton.sim.mutants import MutantResult, mutants
from baton.sim.run import run
from baton.sim.scenario import Scenario

SEEDS = Path(__file__).parent.parent / "seeds"
KEPT = sorted(SEEDS.glob("*.json"))
MUTANTS = mutants()
MUTANT_NAMES = [mutant.name for mutant in MUTANTS]
RELIABILITY = SEEDS.parent.parent / "docs" / "internals" / "reliability.md"


def test_kept_scenarios_pass_and_are_small():
    assert KEPT
    wrong = {path.stem: what for path in KEPT if (what := wrong_with(path.stem, Scenario.load(path)))}
    assert not wrong


def wrong_with(name: str, scenario: Scenario) -> str:
    """Violation of a kept scenario, or bounds that it exceeds. Empty: none."""
    outcome = run(scenario)
    fills_the_queue = name.startswith("queue-")  # the shrinker does not lower the queue's bounds
    fills_a_tier = scenario.host_blocks > 0 or scenario.cluster is not None
    beats = scenario.cluster is not None  # which never end
    bounds = {
        "clients": (len(scenario.clients), 40 if fills_the_queue else 10 if fills_a_tier else 6),
        "faults": (scenario.faults, 6),
        # up to the failing event it is far fewer; here it runs on
        "events": (outcome.events, 2000 if fills_the_queue or beats else 800 if fills_a_tier else 400),
    }
    too_many = [f"{count} {what}, of at most {most}" for what, (count, most) in bounds.items() if count > most]
    return outcome.violation if outcome.invariant is not None else "; ".join(too_many)


def test_mutants_change_one_place():
    assert not [mutant.name for mutant in MUTANTS if mutant.change(source := mutant.path.read_text()) == source]


def test_every_mutant_has_a_kept_scenario():
    assert sorted(MUTANT_NAMES) == [path.stem for path in KEPT if path.stem in MUTANT_NAMES]
    assert len(MUTANT_NAMES) == len(set(MUTANT_NAMES)) >= 80


def test_the_table_in_the_docs_has_every_mutant():
    table = RELIABILITY.read_text().split("<!-- mutants -->")[1].split("<!-- /mutants -->")[0]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in table.strip().splitlines()[2:]]
    assert sorted(rows) == sorted((mutant.name, f"`{mutant.file}`", mutant.fault) for mutant in MUTANTS)


@pytest.fixture(scope="module")
def replayed():
    command = [sys.executable, "-m", "baton.sim.mutants", "replay", str(SEEDS)]
    ran = subprocess.run(command, capture_output=True, check=True, timeout=280)
    return {result.name: result for result in msgspec.json.decode(ran.stdout, type=list[MutantResult])}


def test_kept_scenarios_kill_their_mutants_by_the_same_invariant(replayed):
    assert sorted(replayed) == sorted(MUTANT_NAMES)
    expected = {name: Scenario.load(SEEDS / f"{name}.json").fails for name in MUTANT_NAMES}
    assert None not in expected.values()
    assert not [(expected[name], result) for name, result in replayed.items() if result.invariant != expected[name]]


@pytest.mark.parametrize("name", MUTANT_NAMES[:2])
def test_a_mutant_in_a_process_of_its_own_dies_the_same_death(name, replayed):
    command = [sys.executable, "-m", "baton.sim.mutants", name, "replay", str(SEEDS / f"{name}.json")]
    ran = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert msgspec.json.decode(ran.stdout, type=MutantResult) == replayed[name]
