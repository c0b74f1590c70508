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


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_scenario_passes_and_is_small(path):
    scenario = Scenario.load(path)
    outcome = run(scenario)
    assert outcome.invariant is None, outcome.violation
    fills_the_queue = path.stem.startswith("queue-")  # the shrinker does not lower the queue's bounds
    fills_a_tier = scenario.host_blocks > 0 or scenario.cluster is not None
    assert len(scenario.clients) <= (40 if fills_the_queue else 10 if fills_a_tier else 6)
    assert scenario.faults <= 6
    beats = scenario.cluster is not None  # which never end
    assert outcome.events <= (
        2000 if fills_the_queue or beats else 800 if fills_a_tier else 400
    )  # up to the failing event it is far fewer; here it runs on


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_changes_one_place(mutant):
    source = mutant.path.read_text()
    assert mutant.change(source) != source


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


@pytest.mark.parametrize("name", MUTANT_NAMES)
def test_kept_scenario_kills_its_mutant_by_the_same_invariant(name, replayed):
    assert replayed[name].invariant == Scenario.load(SEEDS / f"{name}.json").fails, replayed[name].message


@pytest.mark.parametrize("name", MUTANT_NAMES[:2])
def test_a_mutant_in_a_process_of_its_own_dies_the_same_death(name, replayed):
    command = [sys.executable, "-m", "baton.sim.mutants", name, "replay", str(SEEDS / f"{name}.json")]
    ran = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert msgspec.json.decode(ran.stdout, type=MutantResult) == replayed[name]
