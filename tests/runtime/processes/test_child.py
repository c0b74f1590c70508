"""How a child ended: who did it decides whether what it computed is suspect."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from run_loop import finish

from baton.runtime.processes.child import Child, Loss, RankSet
from baton.runtime.processes.process_table import ENGINE_CHILDREN


def ended_with(code: int, memory: Any) -> Child:
    process: Any = SimpleNamespace(poll=lambda: code, returncode=code, pid=1)
    control: Any = SimpleNamespace(close=lambda: None)
    return Child(ENGINE_CHILDREN[0], 1, process, control, None, memory)


@pytest.mark.parametrize(
    ("code", "memory_was_short", "cause"),
    [
        (-signal.SIGKILL, False, "killed"),
        (-signal.SIGTERM, False, "killed"),
        (-signal.SIGKILL, True, "died"),  # the kernel did it, and for what the child did
        (-signal.SIGSEGV, False, "died"),
        (1, False, "died"),
        (0, False, "died"),
    ],
)
def test_only_a_kill_from_outside_is_no_fault_of_its_own(code: int, memory_was_short: bool, cause: str):
    child = ended_with(code, SimpleNamespace(since=lambda: (int(memory_was_short), None)))

    async def main() -> None:
        loss = await child.end(1.0)
        assert (loss.cause, loss.code) == (cause, code)

    finish(main())


class FakeRank(Child):
    """Notes what happens to it. Its end takes as long as a grace period does: until something else had time to run."""

    def __init__(self, rank: int, events: list[str]) -> None:
        process, control = (SimpleNamespace(poll=lambda: None, pid=rank), SimpleNamespace(close=lambda: None))
        super().__init__(ENGINE_CHILDREN[0], 1, process, control, None, None, rank)  # type: ignore[arg-type]
        self.events = events

    def kill(self) -> None:
        self.events.append(f"{self.rank} killed")

    async def end(self, grace_seconds: float = 0.0) -> Loss:
        await asyncio.sleep(0)
        self.events.append(f"{self.rank} ended")
        return Loss(f"the end of rank {self.rank}", "died")


def rank_set(count: int) -> tuple[RankSet, list[str]]:
    events: list[str] = []
    ranks = [FakeRank(rank, events) for rank in range(count)]
    return RankSet(ENGINE_CHILDREN[0], 1, ranks, None), events  # type: ignore[arg-type]


def test_when_a_rank_ends_the_others_are_killed_before_its_own_end_is_waited_for():
    """They wait for it in a collective, and never come back: a second of grace is not for them."""
    ranks, events = rank_set(3)

    async def main() -> None:
        loss = await ranks.end_after(ranks.ranks[1], 1.0)
        assert loss.text == "the end of rank 1"

    finish(main())
    assert events[:3] == ["0 killed", "2 killed", "1 ended"]
    assert sorted(events[3:]) == ["0 ended", "1 ended", "2 ended"]
    assert [rank.unwanted for rank in ranks.ranks] == [True, False, True]
    assert ranks.title == "rank 1 of the worker"


def test_the_error_of_a_rank_names_it_and_that_of_one_process_does_not():
    ranks, _ = rank_set(2)
    for child in (ranks.ranks[1], FakeRank(0, [])):
        child.set_last_words("no room")
    assert ranks.ranks[1].last_words == "rank 1: no room"
    assert child.last_words == "no room"


def test_a_set_has_reached_what_its_last_rank_has():
    ranks, _ = rank_set(3)
    assert ranks.awaited("ready") == "ranks 0, 1 and 2 of the worker"
    for rank in (0, 2):
        ranks.ranks[rank].reached.add("ready")
    assert not ranks.has_reached("ready")
    assert ranks.awaited("ready") == ranks.awaited("size") == "rank 1 of the worker", "a rank that is ready knows its size"
    ranks.ranks[1].reached.add("ready")
    assert ranks.has_reached("ready")
