"""Campaigns: what many seeds add up to, whoever runs them."""

from __future__ import annotations

import ast
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from baton.sim import campaign, world
from baton.sim.campaign import CHUNK, LARGE, Campaign, SeedTotals, check_seed, part_of, run_campaign
from baton.sim.outcome import Outcome
from baton.sim.pairs import FAULTS, UNPAIRED, pair_of, pairs, seeds_for_pairs
from baton.sim.run import Kind
from baton.sim.scenario import CacheFaultKind, ClusterFaultKind, NudgeKind, StepFaultKind
from baton.sim.sometimes import CLUSTER_SOMETIMES, FRONT_SOMETIMES
from baton.sim.sometimes import INSTANCE_SOMETIMES as SOMETIMES

SEEDS = 2 * CHUNK + 4  # a chunk for each of two processes, and a part of one


@pytest.fixture(scope="module")
def few_seeds() -> Campaign:
    return run_campaign(range(20, 20 + SEEDS), jobs=2)  # small scenarios


def timeless(ran: Campaign) -> Campaign:
    return msgspec.structs.replace(ran, seconds=0.0, cpu_seconds=0.0, events_per_second=0.0, jobs=0)


def test_seeds_are_clean_and_counted(few_seeds: Campaign):
    assert few_seeds.violations == []
    assert few_seeds.seeds == SEEDS
    assert few_seeds.requests > SEEDS
    assert few_seeds.events > few_seeds.tokens > few_seeds.requests
    assert few_seeds.cpu_seconds > 0
    assert few_seeds.events_per_second == pytest.approx(few_seeds.events / few_seeds.cpu_seconds)


def test_every_state_that_is_seen_is_declared(few_seeds: Campaign):
    assert list(few_seeds.sometimes) == list(SOMETIMES)
    assert len(dict.fromkeys(SOMETIMES)) == len(SOMETIMES)


def test_every_state_that_is_written_out_in_the_code_is_declared():
    """The ones that are too rare for a few seeds. Those made by an f-string are covered by their fixed beginning."""
    named: list[str] = []
    for path in sorted(Path(world.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("saw", "_saw"):
                strings = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
                named += [text for text in strings if isinstance(text, str)]
    assert len(named) > 25
    for name in named:
        states = (*SOMETIMES, *CLUSTER_SOMETIMES, *FRONT_SOMETIMES)
        assert any(state == name or state.startswith(name) or name in state for state in states), name


def test_counts_are_of_seeds_not_of_sightings(few_seeds: Campaign):
    assert max(few_seeds.sometimes.values()) <= SEEDS
    assert few_seeds.sometimes["mode: paused"] == SEEDS


@pytest.mark.slow
def test_any_number_of_jobs_gives_the_same_sums():
    seeds = range(40, 40 + 3 * CHUNK + 1)
    one, two = run_campaign(seeds, jobs=1), run_campaign(seeds, jobs=2)
    assert (one.jobs, two.jobs) == (1, 2)
    assert timeless(one) == timeless(two)


def test_one_seed_alone_is_the_campaign_of_that_seed():
    outcome, ran = check_seed(7), run_campaign(range(7, 8))
    assert ran.digest == outcome.digest
    assert (ran.events, ran.requests, ran.tokens) == (outcome.events, outcome.requests, outcome.tokens)
    assert [name for name, seeds in ran.sometimes.items() if seeds] == [n for n in SOMETIMES if n in outcome.sometimes]


@pytest.mark.slow
def test_progress_is_told_in_whole_chunks():
    told: list[tuple[int, int]] = []
    run_campaign(range(2 * CHUNK + 3), jobs=1, progress=lambda done, found: told.append((done, found)))
    assert told == [(CHUNK, 0), (2 * CHUNK, 0), (2 * CHUNK + 3, 0)]


def fake(seed: int, bad: tuple[int, ...] = (), reached: tuple[str, ...] = SOMETIMES) -> Outcome:
    wrong = {"invariant": 12, "violation": "[12] foreign KV"} if seed in bad else {}
    return Outcome(seed, 10, 1, 3, 0.1, f"{seed:032x}", dict.fromkeys(reached, 5), **wrong)


def test_violations_are_told_by_seed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(campaign, "check_seed", lambda seed, kind: fake(seed, bad=(3, 17)))
    ran = run_campaign(range(20), jobs=1)
    assert [(v.seed, v.invariant, v.message) for v in ran.violations] == [
        (3, 12, "[12] foreign KV"),
        (17, 12, "[12] foreign KV"),
    ]
    assert not ran.ok


@pytest.mark.parametrize(("seeds", "ok"), [(LARGE - 1, True), (LARGE, False)])
def test_a_large_campaign_must_reach_everything(monkeypatch: pytest.MonkeyPatch, seeds: int, ok: bool):
    monkeypatch.setattr(campaign, "check_seed", lambda seed, kind: fake(seed, reached=SOMETIMES[1:]))
    ran = run_campaign(range(seeds), jobs=1)
    assert ran.missing == [SOMETIMES[0]]
    assert ran.ok is ok


@pytest.mark.parametrize(("reached_in", "missing"), [(1, True), (2, False)])
def test_a_state_must_be_reached_in_a_thousandth_of_the_seeds(reached_in: int, missing: bool):
    total = SeedTotals()
    for seed in range(2 * LARGE):
        total.add(part_of(fake(seed, reached=SOMETIMES if seed < reached_in else SOMETIMES[:-1])))
    assert (SOMETIMES[-1] in total.campaign(1.0, 1).missing) is missing


def test_a_scenario_that_cannot_be_built_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    def broken(seed: int, kind: str):
        raise ZeroDivisionError("no blocks")

    monkeypatch.setattr(campaign, "make", broken)
    (violation,) = run_campaign(range(5, 6)).violations
    assert (violation.seed, violation.invariant) == (5, 0)
    assert "ZeroDivisionError: no blocks" in violation.message


@pytest.mark.parametrize("jobs", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_ends_the_campaign_with_what_was_done(jobs: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(campaign, "CHUNK", 2)  # chunks that have begun are waited for

    def interrupt(done: int, found: int) -> None:
        raise KeyboardInterrupt

    ran = run_campaign(range(100_000), jobs=jobs, progress=interrupt)
    assert ran.interrupted
    assert ran.seeds == 2
    assert multiprocessing.active_children() == []


GROUP_INTERRUPT = """
import multiprocessing, os, signal
from baton.sim.campaign import run_campaign
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
ran = run_campaign(range(100_000), jobs=2, progress=lambda done, found: os.killpg(0, signal.SIGINT))
assert ran.interrupted and 0 < ran.seeds < 100_000, ran
assert not multiprocessing.active_children()
print("clean", flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_the_whole_group_and_only_the_parent_acts():
    """A terminal sends it to the children too; none of them may die of it or print a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-c", GROUP_INTERRUPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "clean\n", "")


def test_what_a_process_sends_home_is_bytes():
    sent = campaign._send_chunk(2, 4, 1)
    assert type(sent) is bytes
    part = msgspec.msgpack.decode(sent, type=SeedTotals)
    assert (part.seeds, part.digest.hex()) == (2, run_campaign(range(2, 4)).digest)


def test_pairs_of_faults_that_never_met_are_listed():
    total = SeedTotals(kind="front")
    for faults in (["freeze", "kill"], ["kill", "sleep"], ["kill"]):
        total.add(part_of(msgspec.structs.replace(fake(1), faults=faults), kind="front"))
    ran = total.campaign(1.0, 1)
    assert (ran.pairs, len(ran.pairs_missing)) == (2, len(pairs("front")) - 2)
    assert "freeze + sleep" in ran.pairs_missing
    assert total.pairs["kill + kill"] == 3


@pytest.mark.parametrize(("seeds", "ok"), [(LARGE - 1, True), (LARGE, False)])
def test_a_large_campaign_must_reach_every_pair(monkeypatch: pytest.MonkeyPatch, seeds: int, ok: bool):
    """It fails for one pair that never met, as for a state that was never reached."""
    faults = [kind for kind in FAULTS["front"] if kind != "sleep"]
    outcome = msgspec.structs.replace(fake(1, reached=FRONT_SOMETIMES), faults=sorted(faults))
    monkeypatch.setattr(campaign, "check_seed", lambda seed, kind: outcome)
    ran = run_campaign(range(seeds), jobs=1, kind="front")
    assert (len(ran.pairs_missing), ran.missing, ran.ok) == (len(faults), [], ok)


@pytest.mark.parametrize("kind", ["instance", "cluster"])
def test_every_pair_is_drawn_by_its_number(kind: Kind):
    """2 * n seeds in a row draw each of the n pairs, and a campaign of 2,000 has as many."""
    count = seeds_for_pairs(kind)
    assert count <= 2_000
    drawn = [pair_of(seed, kind) for seed in range(count)]
    assert sorted(pair for pair in drawn if pair) == sorted(pairs(kind))


def test_both_kinds_of_a_pair_strike():
    seed = next(seed for seed in range(2_000) if pair_of(seed, "instance") == ("copy slow", "rank_hangs"))
    outcome = check_seed(seed)
    assert outcome.invariant is None
    assert {"copy slow", "rank_hangs"} <= {*outcome.faults}


def test_a_third_order_to_wake_that_is_one_too_many_may_be_refused():
    """The check excused no such order."""
    assert check_seed(1795900000167).violation == ""


def test_every_kind_of_fault_is_part_of_a_pair():
    counted = {*get_args(StepFaultKind), *get_args(NudgeKind), "poison", *(f"copy {kind}" for kind in get_args(CacheFaultKind))}
    assert {*FAULTS["instance"]} == counted
    assert {*get_args(ClusterFaultKind)} - {*FAULTS["cluster"]} == {*UNPAIRED}
