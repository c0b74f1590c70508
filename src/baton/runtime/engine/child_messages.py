"""Dispatches messages of an engine's children to its parts (called by child_set.py)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Final

from baton.core.events import BlocksMoved, StepDone, StorageAnswered
from baton.core.rank_messages import CacheRanks, WorkerRanks
from baton.protocol.codec import Message
from baton.protocol.control import CacheHello, CacheStats, LoadProgress, Pong, ProgressShared, WorkerHello
from baton.protocol.moves import MoveResult, StorageAnswer
from baton.protocol.pool import HostPoolReady, PoolAttached, PoolDetached, PoolReady, PoolSized
from baton.protocol.step import StepResult
from baton.runtime.engine.cache_supervisor import CACHE, CacheSupervisor
from baton.runtime.engine.instance_loop import InstanceLoop
from baton.runtime.engine.pool_registry import PoolRegistry
from baton.runtime.engine.rank_messages import share_collective
from baton.runtime.engine.startup import Milestone, Startup
from baton.runtime.engine.worker_supervisor import WORKER, WorkerSupervisor
from baton.runtime.processes.child import Child, Loss
from baton.runtime.wire.channel import Channel

logger = logging.getLogger("baton.engine")

MILESTONES: Final[dict[type, Milestone]] = {
    PoolSized: "size",
    PoolAttached: "attach",
    WorkerHello: "ready",
    CacheHello: "ready",
}
"""Messages by which a process reports the progress of its start."""


class ChildMessages:
    """Implements child_set.Parent."""

    pool: PoolRegistry
    startup: Startup
    cache: CacheSupervisor
    worker: WorkerSupervisor
    "The next four need the children, so they are created after them, and set before the first child is started."

    def __init__(self, machine: InstanceLoop, supervisor: Channel, on_over: Callable[[BaseException], None]) -> None:
        self._machine = machine
        self._supervisor = supervisor
        self.on_over = on_over
        self._ranks: dict[str, WorkerRanks | CacheRanks] = {}
        "Ranks of the present children that have several."

    def on_started(self, child: Child) -> None:
        if child.name == WORKER:
            self.worker.health.detach()
        if len(child.ranks) > 1:
            count = len(child.ranks)
            if child.name == WORKER:
                self._ranks[child.name] = WorkerRanks(count)
                share_collective(child)
            else:
                self._ranks[child.name] = CacheRanks(count)
        self.cache.on_started(child)
        self.pool.send_pools(child)

    def on_lost(self, child: Child, loss: Loss) -> None:
        logger.warning("%s", loss.text)
        self.pool.on_lost(child)
        if child.name == CACHE:
            self.cache.on_lost()
        elif child.name == WORKER:
            self.worker.on_lost(child, loss)

    def on_descriptor(self, child: Child, message: Message, fd: int) -> None:
        if type(message) is HostPoolReady:
            self.pool.hold_host_pool(child, message, fd)
        elif type(message) is PoolReady:
            child.mark_ready()
            child.reached.add("create")
            self.pool.on_announced(child, message, fd)
            self.startup.reach("create", child.name, child.rank, len(child.whole.ranks))
        elif type(message) is ProgressShared:
            self.worker.health.attach(fd, child.rank)
        else:
            os.close(fd)

    def on_message(self, child: Child, message: Message) -> None:
        if self._ranks:
            if (milestone := MILESTONES.get(type(message))) is not None:
                child.reached.add(milestone)
            combined = self._ranks[child.name].combined(child.rank, message)
            if combined is None:
                return
            message = combined
        if type(message) is StepResult:  # nearly all messages are results
            self._machine.dispatch(StepDone(message))
        else:
            self._on_rare_message(child, message)

    def _on_rare_message(self, child: Child, message: Message) -> None:
        """Dispatch a message that is not a step result: of the start, of pools, moves, storage, or an answer to a ping."""
        match message:
            case Pong():
                self.worker.on_pong(message)
            case LoadProgress() if not self._machine.begun:
                self._supervisor.send(message)
            case PoolSized():
                self.startup.on_sized(child.name, message)
            case PoolAttached():
                child.mark_ready()
                self.pool.on_attached(child, message.incarnation)
                self.startup.reach("attach", child.name, child.rank, len(child.whole.ranks))
            case PoolDetached():
                self.pool.on_detached(child, message.incarnation)
            case MoveResult():
                self._machine.dispatch(BlocksMoved(message))
                self.cache.log_storage_changes()
            case StorageAnswer():
                self._machine.dispatch(StorageAnswered(message))
                self.cache.log_storage_changes()
            case CacheHello():
                self.cache.on_hello(message)
            case CacheStats():
                self.cache.on_stats(message)
            case WorkerHello():
                child.whole.mark_ready()
                if self._machine.begun:
                    self.worker.on_hello(child.whole, message)
                else:
                    self.startup.on_hello(child.name, message)
