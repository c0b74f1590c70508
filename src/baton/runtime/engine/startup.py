"""Performs a row of core/startup.py: one step after the other, each within the time limit of the start.

A child that dies meanwhile ends the start by itself (child_set.py): no step has to check for that.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final, Literal

from baton.config import EngineConfig
from baton.core.startup import Action, StartupPlan, StartupStep
from baton.errors import Unavailable
from baton.protocol.control import WorkerHello
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import CreatePool, PoolSized, set_incarnation
from baton.runtime.processes.child_set import ChildSet

Milestone = Action | Literal["ready"]
WAITED_FOR: Final[dict[Milestone, str]] = {
    "size": "to find out how many KV blocks fit",
    "create": "to make the KV pool",
    "attach": "to attach to the KV pool",
    "ready": "to take its work",
}


class Startup:
    def __init__(
        self, plan: StartupPlan, children: ChildSet[EngineConfig], blocks: int | None, seconds: float, ranks: int = 1
    ) -> None:
        self._plan = plan
        self._children = children
        pools = set_incarnation(secrets.randbits(57)) if ranks > 1 else PoolIncarnation(0)
        self._order = CreatePool(blocks or 0, incarnation=pools)
        self._seconds = seconds
        self._reached: dict[tuple[Milestone, str], set[int]] = {}
        "Ranks that have reached each milestone."
        self._done: dict[tuple[Milestone, str], None] = {}
        self._progress = asyncio.Event()
        self._hello: WorkerHello | None = None
        self._waiting: tuple[Milestone, str] = ("ready", "worker")

    def on_sized(self, process: str, sized: PoolSized) -> None:
        self._order = CreatePool(sized.blocks, sized.layout, self._order.incarnation)
        self.reach("size", process)

    def on_hello(self, process: str, hello: WorkerHello) -> None:
        self._hello = hello
        self.reach("size", process)  # the hello implies this milestone
        self.reach("ready", process)

    def reach(self, milestone: Milestone, process: str, rank: int = 0, ranks: int = 1) -> None:
        """Record a milestone. `ranks`: number of ranks that have to reach it. A message of a whole set is one rank's."""
        reached = self._reached.setdefault((milestone, process), set())
        reached.add(rank)
        if len(reached) >= ranks:
            self._done[milestone, process] = None
            self._progress.set()

    async def run(self) -> WorkerHello:
        try:
            async with asyncio.timeout(self._seconds):
                for step in self._plan.steps:
                    await self._carry_out(step)
                await self._wait("ready", "worker")
                if self._plan.creator == "messenger":
                    await self._wait("ready", "cache")  # an instance of a pair is useless without hand-offs
        except TimeoutError:
            raise Unavailable(
                f"not ready within {self._seconds:g} s (start_seconds_max): waited for {self._awaited()}"
            ) from None
        assert self._hello is not None
        return self._hello

    async def _carry_out(self, step: StartupStep) -> None:
        if step.action == "start":
            await self._children.start(step.process)
            return
        if step == StartupStep("create", "cache") and (child := self._children.get(step.process)) is not None:
            child.control.send(self._order)
        if step == StartupStep("create", "worker") and not self._plan.attachers:
            return  # No other process attaches to the pool, so it is not announced: the worker's hello implies that it exists.
        await self._wait(step.action, step.process)

    async def _wait(self, milestone: Milestone, process: str) -> None:
        self._waiting = (milestone, process)
        while (milestone, process) not in self._done:
            self._progress.clear()
            await self._progress.wait()

    def _awaited(self) -> str:
        """The process or milestone that the start waits for, with the late ranks."""
        milestone, process = self._waiting
        child = self._children.get(process)
        who = f"the {process}" if child is None else child.awaited(milestone)
        return f"{who} {WAITED_FOR[milestone]}"
