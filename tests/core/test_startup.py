"""The eight rows of docs/internals/protocol.md section 3, written down a second time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.core import startup
from baton.core.startup import PROCESS_OF, plan_startup

ROWS = [
    (False, "mixed", True, "start worker, size worker, create worker, start cache, attach cache", "worker", ["transfer"]),
    (False, "mixed", False, "start worker, size worker, create worker", "worker", []),
    (
        *(False, "split", True, "start worker, size worker, start cache, create cache, attach worker"),
        *("messenger", ["worker", "transfer"]),
    ),
    (False, "split", False, "start worker, size worker, start cache, create cache, attach worker", "messenger", ["worker"]),
    (True, "mixed", True, "start worker, create worker, start cache, attach cache", "worker", ["transfer"]),
    (True, "mixed", False, "start worker, create worker", "worker", []),
    (True, "split", True, "start cache, create cache, start worker, attach worker", "messenger", ["worker", "transfer"]),
    (True, "split", False, "start cache, create cache, start worker, attach worker", "messenger", ["worker"]),
]


@pytest.mark.parametrize(("given", "role", "tiers", "steps", "creator", "attachers"), ROWS)
def test_a_row(given: bool, role: str, tiers: bool, steps: str, creator: str, attachers: list[str]):
    for name in ("prefill", "decode") if role == "split" else ("mixed",):
        plan = plan_startup(blocks_given=given, role=name, tiers=tiers)
        assert ", ".join(f"{step.action} {step.process}" for step in plan.steps) == steps
        assert (plan.creator, list(plan.attachers)) == (creator, attachers)


@pytest.mark.parametrize(("given", "role", "tiers", "steps", "creator", "attachers"), ROWS)
def test_what_holds_of_every_row(given: bool, role: str, tiers: bool, steps: str, creator: str, attachers: list[str]):
    plan = plan_startup(blocks_given=given, role="decode" if role == "split" else role, tiers=tiers)
    users = {creator, *attachers}
    assert {PROCESS_OF[user] for user in users} == {*plan.processes}, "a process is started that the row does not need"
    begun = set()
    for step in plan.steps:
        if step.action == "start":
            begun.add(step.process)
        assert step.process in begun, "nothing is asked of a process that does not exist"
    assert [step.action for step in plan.steps].count("create") == 1
    for process in plan.processes:
        confirmed = any(step.action == "attach" and step.process == process for step in plan.steps)
        assert (process != PROCESS_OF[creator] and process in [PROCESS_OF[user] for user in attachers]) == confirmed


def test_the_table_in_the_page_is_the_one_in_the_code():
    """Both are drawn by hand: they say the same."""
    whole = (Path(__file__).parents[2] / "docs" / "internals" / "protocol.md").read_text()
    page = whole.split("## 3. ")[1].split("## 4. ")[0]
    assert table_of(page) == table_of(startup.__doc__)
    assert len(table_of(page)) == 1 + len(ROWS)


def table_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|") and not re.fullmatch(r"[| -]+", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
