"""Performs a row of core/startup.py: one step after the other, each within the time limit of the start.

A child that dies meanwhile ends the start by itself (child_set.py): no step has to check for that.
"""

from __future__ import annotations

import asyncio
from typing import Final, Literal

from baton.config import EngineConfig
from baton.core.startup import Action, StartupPlan, StartupStep
from baton.errors import Unavailable
from baton.protocol.control import WorkerHello
from baton.protocol.pool import CreatePool, PoolSized
from baton.runtime.processes.child_set import ChildSet

Milestone = Action | Literal["ready"]
WAITED_FOR: Final[dict[Milestone, str]] = {
    "size": "to find out how many KV blocks fit",
    "create": "to make the KV pool",
    "attach": "to attach to the KV pool",
    "ready": "to take its work",
}


class Startup:
    def __init__(self, plan: StartupPlan, children: ChildSet[EngineConfig], blocks: int | None, seconds: float) -> None:
        self._plan = plan
        self._children = children
        self._order = CreatePool(blocks or 0)
        self._seconds = seconds
        self._reached: dict[tuple[Milestone, str], None] = {}
        self._progress = asyncio.Event()
        self._hello: WorkerHello | None = None
        self._waiting = ""

    def on_sized(self, process: str, sized: PoolSized) -> None:
        self._order = CreatePool(sized.blocks, sized.layout)
        self.reach("size", process)

    def on_hello(self, process: str, hello: WorkerHello) -> None:
        self._hello = hello
        self.reach("size", process)  # the hello implies it
        self.reach("ready", process)

    def reach(self, milestone: Milestone, process: str) -> None:
        self._reached[milestone, process] = None
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
            raise Unavailable(f"not ready within {self._seconds:g} s (start_seconds_max): waited for {self._waiting}") from None
        assert self._hello is not None
        return self._hello

    async def _carry_out(self, step: StartupStep) -> None:
        if step.action == "start":
            await self._children.start(step.process)
            return
        if step == StartupStep("create", "cache") and (child := self._children.get(step.process)) is not None:
            child.control.send(self._order)
        if step == StartupStep("create", "worker") and not self._plan.attachers:
            return  # no other process attaches to it, so it is not announced: the worker's hello implies that it exists
        await self._wait(step.action, step.process)

    async def _wait(self, milestone: Milestone, process: str) -> None:
        self._waiting = f"the {process} {WAITED_FOR[milestone]}"
        while (milestone, process) not in self._reached:
            self._progress.clear()
            await self._progress.wait()
