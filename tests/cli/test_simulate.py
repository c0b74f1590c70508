"""`baton simulate`, as people run it: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command_rig import baton_here

from baton import __version__
from baton.sim.generate import generate
from baton.sim.scenario import Scenario

KEYS = {"seeds", "requests", "events", "heap_events", "events_per_second", "violations", "sometimes",
        "tokens", "virtual_seconds", "seconds", "cpu_seconds", "jobs"}  # fmt: skip

BATON = ("-m", "baton.cli.main")
BROKEN = ("-c", "import baton.sim.worker as w; w.draw = lambda *_: 3; from baton.cli.main import app; app()")
"""A worker that always answers 3: invariant 21 breaks in nearly every seed."""


def baton(*arguments: str | Path, program: tuple[str, ...] = BATON, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "COLUMNS": "100", "NO_COLOR": "1"}
    command = [sys.executable, *program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def answer(*arguments: str | Path, **how: Any) -> dict[str, Any]:
    run = baton if how or "--jobs" in arguments else baton_here
    ran = run("simulate", "--json", *arguments, **how)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return json.loads(ran.stdout)


@cache
def digest_of_seed_7() -> str:
    return answer("--seed", "7")["digest"]


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    path = tmp_path / "seed-7.json"
    generate(7).save(path)
    return path


# The answer


def test_json_says_it_all():
    said = answer("--seeds", "0:9", "--jobs", "2")
    assert said.keys() >= KEYS
    assert (said["seeds"], said["jobs"], said["violations"]) == (9, 2, [])
    assert said["sometimes"]["mode: paused"] == 9
    assert said["events"] > said["tokens"] > 0


@pytest.mark.slow
def test_the_summary_says_it_to_people():
    ran = baton("simulate", "--seeds", "3:6", "--jobs", "1")
    assert (ran.returncode, ran.stderr) == (0, "")
    for words in (
        "seeds      3 in ",
        "requests ",
        "counted (",
        "per second and core",
        "on the heap",
        "violations 0",
        "mode: paused",
        "not reached",
    ):
        assert words in ran.stdout


def test_one_seed_is_told_with_its_digest():
    ran = baton("simulate", "--seed", "7")
    assert ran.returncode == 0
    assert ran.stdout.startswith("seed 7: ok\n")
    assert digest_of_seed_7() in ran.stdout


@pytest.mark.slow
def test_the_digest_depends_on_the_seed_alone():
    """Not on the order in which a process happens to hash strings, nor on who runs what."""
    one = answer("--seeds", "0:2", "--jobs", "1", hash_seed="1")
    two = answer("--seeds", "0:2", "--jobs", "2", hash_seed="2")
    assert one["digest"] == two["digest"]
    assert {key: one[key] for key in ("events", "tokens", "sometimes", "virtual_seconds")} == {
        key: two[key] for key in ("events", "tokens", "sometimes", "virtual_seconds")
    }
    assert answer("--seed", "3", hash_seed="1")["digest"] == answer("--seed", "3", hash_seed="2")["digest"]


def test_a_scenario_file_is_the_seed_that_made_it(scenario_file: Path):
    assert answer("--scenario", scenario_file)["digest"] == digest_of_seed_7()


# Traces


def test_trace_prints_a_column_an_actor_and_then_the_outcome():
    ran = baton_here("simulate", "--seed", "7", "--trace")
    assert ran.returncode == 0
    for words in ("client ", "r0 submits", "plan 1:", "ready, epoch 1", "result 1:", "seed 7: ok"):
        assert words in ran.stdout


def test_perfetto_writes_a_file_and_changes_nothing(scenario_file: Path, tmp_path: Path):
    path = tmp_path / "trace.json"
    said = answer("--scenario", scenario_file, "--perfetto", path)
    assert said["digest"] == digest_of_seed_7()
    named = [event["args"]["name"] for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "thread_name"]
    assert [f"{client.id}.0" for client in generate(7).clients if f"{client.id}.0" not in named] == []


# Findings


def test_a_violation_is_told_with_the_command_that_replays_it():
    ran = baton("simulate", "--seeds", "0:4", "--jobs", "1", program=BROKEN)
    assert ran.returncode == 1
    assert "[21]" in ran.stdout
    assert "replay: baton simulate --seed 0 --trace" in ran.stdout
    one = baton("simulate", "--seed", "0", program=BROKEN)
    assert one.returncode == 1
    assert "seed 0: VIOLATION" in one.stdout


def test_shrink_leaves_a_small_scenario_that_fails_the_same_way(tmp_path: Path):
    ran = baton("simulate", "--seeds", "0:2", "--jobs", "1", "--json", "--shrink", tmp_path / "found", program=BROKEN)
    assert ran.returncode == 1
    assert {violation["invariant"] for violation in json.loads(ran.stdout)["violations"]} == {21}
    (path,) = (tmp_path / "found").iterdir()
    assert path.name == "invariant-21-seed-0.json"
    assert str(path) in ran.stderr
    small = Scenario.load(path)
    assert (len(small.clients), small.faults, small.fails) == (0, 0, None), "the requests after healing fail alone"
    assert small.note.startswith("seed 0: [21]")
    again = baton("simulate", "--scenario", path, program=BROKEN)
    assert again.returncode == 1
    assert "[21]" in again.stdout
    assert f"--scenario {path} --trace" in again.stdout
    assert baton_here("simulate", "--scenario", path).returncode == 0


MUTANTS = """
import sys
from baton.sim import mutants
two = tuple(m for m in mutants.mutants() if m.name in ("one-token-too-many", "share-without-reference"))
mutants.mutants = lambda: two
if sys.argv.pop() == "blunt":
    mutants.run_mutants = lambda names, seeds, jobs, progress: [
        mutants.MutantResult(name, "core/x.py", "a fault", None, seeds, None, "survived") for name in names]
from baton.cli.main import app
app()
"""


def test_mutants_are_found_or_the_command_fails():
    ran = baton("simulate", "--mutants", "--seeds", "0:20", "--jobs", "2", "sharp", program=("-c", MUTANTS))
    assert ran.returncode == 0, ran.stderr
    assert "one-token-too-many" in ran.stdout
    assert "2 of 2 mutants killed" in ran.stdout
    blunt = baton("simulate", "--mutants", "--seeds", "0:20", "blunt", program=("-c", MUTANTS))
    assert blunt.returncode == 1
    assert "SURVIVED" in blunt.stdout
    assert "FAILED" in blunt.stdout


def test_mutants_as_json():
    said = baton("simulate", "--mutants", "--json", "--seeds", "0:20", "blunt", program=("-c", MUTANTS))
    assert json.loads(said.stdout)["survivors"] == ["share-without-reference", "one-token-too-many"]


def test_an_installed_package_says_where_the_mutants_are():
    away = "from baton.sim import mutants; mutants.FOLDER = mutants.FOLDER / 'none'"
    program = f"{away}; from baton.cli.main import app; app()"
    ran = baton("simulate", "--mutants", program=("-c", program))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "run this in a checkout of Baton (make mutants)" in ran.stderr
    assert ran.stderr.count("\n") == 1


# Usage


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("--seed", "1", "--seeds", "0:3"), "give one of them"),
        (("--seed", "1", "--scenario", "x.json"), "give one of them"),
        (("--seeds", "5"), "write A:B"),
        (("--seeds", "a:b"), "write A:B"),
        (("--seeds", "-3:5"), "write A:B"),
        (("--seeds", "9:9"), "A must be less than B"),
        (("--scenario", "/nowhere/x.json"), "No such file"),
        (("--trace",), "add --seed N or --scenario FILE"),
        (("--perfetto", "x.json"), "add --seed N or --scenario FILE"),
        (("--seed", "1", "--trace", "--json"), "leave out one"),
        (("--seed", "1", "--perfetto", "/nowhere/x.json"), "make it first"),
        (("--mutants", "--seed", "1"), "leave out --seed"),
        (("--mutants", "--trace"), "leave out --trace"),
        (("--mutants", "--seeds", "5:9"), "write --seeds 0:9"),
        (("--shrink", "/dev/null"), "give another directory"),
    ],
)
def test_wrong_usage_is_answered_with_advice_in_one_line(arguments: tuple[str, ...], advice: str):
    ran = baton_here("simulate", *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("baton simulate: ")
    assert advice in ran.stderr
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "advice"),
    [
        ('"blocks":', '"bloks":', "unknown field `bloks`"),
        ('"slots":', '"slotz": 3, "slots":', "unknown field `slotz`"),
        ('"id": "r0",', '"id": "r0", "abort_on": 3,', "unknown field `abort_on` - at `$.clients[0]`"),
        ('"id": "r0",', '"id": "r1",', "two clients have one id"),
        ('"clients": [', '"clients": [ {"id": "r-1", "at": 0.0, "prompt": [1], "max_tokens": 1, "n": 0},', "n"),
        ('"slots":', '"slots": 0, "steps_in_flight":', "cannot be run"),
        ("{", "", "is no scenario"),
    ],
)
def test_a_scenario_file_with_a_mistake_is_not_run(scenario_file: Path, old: str, new: str, advice: str):
    text = scenario_file.read_text()
    assert old in text
    scenario_file.write_text(text.replace(old, new, 1))
    ran = baton_here("simulate", "--scenario", scenario_file)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert advice in ran.stderr
    assert ran.stderr.count("\n") == 1


# The program


def test_without_arguments_it_helps():
    ran = baton()
    assert "simulate" in ran.stdout + ran.stderr
    assert "version" in ran.stdout + ran.stderr


def test_help_has_examples():
    ran = baton_here("simulate", "--help")
    assert ran.returncode == 0
    assert "baton simulate --seed 4711" in ran.stdout


def test_version():
    ran = baton_here("version")
    assert (ran.returncode, ran.stdout.split()[:2]) == (0, ["baton", __version__])


def test_help_loads_no_simulator():
    heavy = "('msgspec', 'baton.core', 'baton.sim', 'multiprocessing', 'rich.progress')"
    code = f"import baton.cli.main, sys; print([name for name in {heavy} if name in sys.modules])"
    assert baton(program=("-c", code)).stdout == "[]\n"
