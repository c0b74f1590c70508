"""Dispatches messages of an engine's children to its parts (called by child_set.py)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from baton.core.events import BlocksMoved, StepDone, StorageAnswered
from baton.protocol.codec import Message
from baton.protocol.control import CacheHello, CacheStats, LoadProgress, Pong, ProgressShared, WorkerHello
from baton.protocol.moves import MoveResult, StorageAnswer
from baton.protocol.pool import HostPoolReady, PoolAttached, PoolDetached, PoolReady, PoolSized
from baton.protocol.step import StepResult
from baton.runtime.engine.cache_supervisor import CACHE, CacheSupervisor
from baton.runtime.engine.instance_loop import InstanceLoop
from baton.runtime.engine.pool_registry import PoolRegistry
from baton.runtime.engine.startup import Startup
from baton.runtime.engine.worker_supervisor import WORKER, WorkerSupervisor
from baton.runtime.processes.child import Child, Loss
from baton.runtime.wire.channel import Channel

logger = logging.getLogger("baton.engine")


class ChildMessages:
    """Implements child_set.Parent."""

    pool: PoolRegistry
    startup: Startup
    cache: CacheSupervisor
    worker: WorkerSupervisor
    "These four need the children, so they are created after them, and set before the first one is started."

    def __init__(self, machine: InstanceLoop, supervisor: Channel, on_over: Callable[[BaseException], None]) -> None:
        self._machine = machine
        self._supervisor = supervisor
        self.on_over = on_over

    def on_started(self, child: Child) -> None:
        self.cache.on_started(child)
        self.pool.hand_to(child)

    def on_lost(self, child: Child, loss: Loss) -> None:
        logger.warning("%s", loss.text)
        self.pool.on_lost(child)
        if child.name == CACHE:
            self.cache.on_lost()
        elif child.name == WORKER:
            self.worker.on_lost(child, loss)

    def on_descriptor(self, child: Child, message: Message, fd: int) -> None:
        if type(message) is HostPoolReady:
            self.pool.keep_host(message, fd)
        elif type(message) is PoolReady:
            child.mark_ready()
            self.pool.on_announced(child, message, fd)
            self.startup.reach("create", child.name)
        elif type(message) is ProgressShared:
            self.worker.health.attach(fd)
        else:
            os.close(fd)

    def on_message(self, child: Child, message: Message) -> None:
        if type(message) is StepResult:  # nearly all messages
            self._machine.dispatch(StepDone(message))
        else:
            self._on_rare_message(child, message)

    def _on_rare_message(self, child: Child, message: Message) -> None:
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
                self.startup.reach("attach", child.name)
            case PoolDetached():
                self.pool.on_detached(child, message.incarnation)
            case MoveResult():
                self._machine.dispatch(BlocksMoved(message))
                self.cache.look_at_storage()
            case StorageAnswer():
                self._machine.dispatch(StorageAnswered(message))
                self.cache.look_at_storage()
            case CacheHello():
                self.cache.on_hello(message)
            case CacheStats():
                self.cache.on_stats(message)
            case WorkerHello():
                child.mark_ready()
                if self._machine.begun:
                    self.worker.on_hello(child, message)
                else:
                    self.startup.on_hello(child.name, message)
