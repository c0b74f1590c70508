"""Traces: they show everything, and change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.sim import worker
from baton.sim.generate import generate
from baton.sim.scenario import Client, Nudge, Scenario, StepFault
from baton.sim.trace import WIDTHS, ColumnTrace, PerfettoTrace, Tee
from baton.sim.world import Outcome, PlainWorld

SEEDS = (2, 5, 11, 15, 29)


def busy() -> Scenario:
    """Small, and everything happens: siblings, a preemption, a lost worker, a refusal, an abort, a pause."""
    clients = [Client(f"r{number}", 0.01 * number, [1, 2, 3, 4, number], 8, n=1 + number % 2) for number in range(5)]
    clients.append(Client("too-long", 0.0, [1] * 60, 60))
    clients[4].abort_at = 0.2
    return Scenario(
        seed=1,
        blocks=12,
        block_size=2,
        slots=3,
        tokens_per_step=8,
        chunk_tokens_max=2,
        clients=clients,
        steps=[StepFault(9, "crash_before")],
        nudges=[Nudge(0.05, "preempt"), Nudge(3.0, "pause"), Nudge(3.1, "resume")],
    )


def traced(scenario: Scenario) -> tuple[PlainWorld, Outcome, list[str], dict[str, Any]]:
    columns, picture = ColumnTrace(), PerfettoTrace()
    run = PlainWorld(scenario, Tee([columns, picture]))
    outcome = run.run()
    return run, outcome, columns.lines, json.loads(picture.encode(outcome))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_traced_run_is_the_same_run(seed: int):
    _, outcome, _, _ = traced(generate(seed))
    assert outcome == PlainWorld(generate(seed)).run()


# Columns


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(" | ")]


def test_every_actor_has_a_column_and_says_something():
    _, _, lines, _ = traced(busy())
    assert cells(lines[0]) == ["time", *WIDTHS]
    said = [cells(line) + [""] * 5 for line in lines[2:]]
    for place, words in enumerate((["submits", "gets", "ends: length", "refused: never_fits", "leaves"],
                                   ["plan 1:", "prefill", "decode -> preempting", "is paused"],
                                   ["ready, epoch 1", "result 1:", "dies before a step", "starting epoch 2"],
                                   [],  # it has no cache service
                                   ["preempt", "pause", "resume"]), start=1):  # fmt: skip
        column = "\n".join(row[place] for row in said)
        for word in words:
            assert word in column, (word, column)


@pytest.mark.parametrize("seed", SEEDS)
def test_lines_fit_and_time_does_not_go_back(seed: int):
    _, _, lines, _ = traced(generate(seed))
    assert max(map(len, lines)) <= 160
    times = [float(time) for line in lines[2:] if (time := cells(line)[0])]
    assert times == sorted(times)


def test_lines_are_handed_on_as_they_come():
    got: list[str] = []
    trace = ColumnTrace(got.append)
    trace.note(1.5, "world", "a very long remark about the weather in the world")
    assert len(got) > 3
    assert trace.lines == []
    assert got[2].startswith("   1.500000 |")
    assert got[3].startswith("            |")


# Perfetto


def tracks(trace: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {e["args"]["name"]: (e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}


def slices(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    track = tracks(trace)[name]
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == track]


@pytest.mark.parametrize("seed", SEEDS)
def test_events_are_what_the_format_asks_for(seed: int):
    _, _, _, trace = traced(generate(seed))
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "i", "C", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(value >= 0 for value in event["args"].values())
    tids = list(tracks(trace).values())
    assert len(dict.fromkeys(tid for _, tid in tids)) == len(tids)


@pytest.mark.parametrize("seed", SEEDS)
def test_slices_of_a_track_follow_each_other(seed: int):
    _, _, _, trace = traced(generate(seed))
    for name in tracks(trace):
        end = 0
        for piece in slices(trace, name):
            assert piece["ts"] >= end, (name, piece)
            end = piece["ts"] + piece["dur"]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_submitted_sequence_has_a_track_with_all_its_tokens_and_one_end(seed: int):
    run, _, _, trace = traced(generate(seed))
    named = tracks(trace)
    for client_request in run.watch.all_requests:
        for index in range(client_request.client.n):
            track = named[f"{client_request.name}.{index}"]
            marks = [e["name"] for e in trace["traceEvents"] if e["ph"] == "i" and (e["pid"], e.get("tid")) == track]
            assert [mark for mark in marks if mark.startswith("token")] == [
                f"token {t}" for t in client_request.delivered[index]
            ]
            end = f"refused: {client_request.refused}" if client_request.refused else f"ends: {client_request.ended[index]}"
            assert [mark for mark in marks if not mark.startswith("token")] == [end]


def test_a_life_is_drawn_phase_by_phase():
    _, _, _, trace = traced(busy())
    assert [piece["name"] for piece in slices(trace, "r1.1")][:2] == ["held", "waiting"]
    drawn = {piece["name"] for name in tracks(trace) if name.startswith("r") for piece in slices(trace, name)}
    assert drawn == {"held", "waiting", "prefill", "decode", "preempting", "closing"}
    assert slices(trace, "too-long.0") == []


def test_the_worker_and_its_steps_are_drawn():
    run, _, _, trace = traced(busy())
    steps = slices(trace, "steps")
    assert len(steps) == run.machine.stats.steps
    assert [piece["name"] for piece in steps][:2] == ["step 1", "step 2"]
    assert any(piece["args"]["outcome"] == "lost" for piece in steps)
    life = [piece["name"] for piece in slices(trace, "worker")]
    assert life == ["epoch 1: ready", "epoch 2: starting", "epoch 2: ready"]
    assert [piece["name"] for piece in slices(trace, "mode")] == ["serving", "paused", "serving", "paused"]


def test_counters_add_up():
    _, _, _, trace = traced(busy())
    blocks = [e["args"] for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == "blocks"]
    assert len(blocks) > 10
    assert all(count["free"] + count["cached"] + count["held"] == 12 for count in blocks)
    lines = [e["args"] for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == "sequences"]
    assert max(count["running"] for count in lines) == 3
    assert lines[-1] == {"running": 0, "waiting": 0}


def test_a_run_that_breaks_off_is_drawn_up_to_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(worker, "draw", lambda *_: 3)
    picture = PerfettoTrace()
    outcome = PlainWorld(busy(), picture).run()
    assert outcome.invariant == 21
    picture.save(tmp_path / "trace.json", outcome)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"] == {"seed": 1, "digest": outcome.digest}
    (broken,) = [e for e in trace["traceEvents"] if e["name"].startswith("violation")]
    assert broken["ts"] == round(outcome.virtual_seconds * 1e6)
    assert [piece["args"]["outcome"] for piece in slices(trace, "steps")][-1] == "unfinished"
    assert all(piece["ts"] + piece["dur"] <= broken["ts"] for piece in trace["traceEvents"] if piece["ph"] == "X")
