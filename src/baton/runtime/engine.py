"""The engine process: the instance machine on a real loop, between the front's channel and the worker's.

    front --requests, aborts, pings--> ENGINE --plans--> worker
          <--tokens, ends, numbers---         <-results-

It starts its worker and starts another when that one is lost; the machine decides, this file acts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton.config import EngineConfig, WorkerConfig
from baton.core.effects import Effect, ModeChanged, Refuse, RestartWorker, RunStep
from baton.core.engine.instance import Instance
from baton.core.events import Abort, Event, Pause, Resume, StepDone, Submit, Tick, WorkerLost, WorkerReady
from baton.errors import EngineError, ProtocolError
from baton.protocol.codec import Message
from baton.protocol.control import (
    AbortRequest,
    InstanceReady,
    LoadProgress,
    ModeReport,
    PauseInstance,
    Ping,
    Pong,
    RefusedRequest,
    ResumeInstance,
    StartFailed,
    WorkerHello,
)
from baton.protocol.ids import RequestId, WorkerEpoch
from baton.protocol.output import Emit
from baton.protocol.request import FinishReason, GenerateRequest
from baton.protocol.step import StepResult
from baton.runtime.channel import Channel
from baton.runtime.children import begin_child, exit_text, start_child
from baton.runtime.driver import Driver
from baton.runtime.snapshot import snapshot

STATS_SECONDS = 0.2
"""Numbers go to the front at most this often while there is work, and once more when there is none."""

QUIET_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Threads of the worker sleep while they wait: on few cores a spinning one takes its neighbour's time."""


class WorkerProcess:
    """One life of the worker."""

    def __init__(self, epoch: WorkerEpoch, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.epoch = epoch
        self.process = process
        self.channel = channel

    @classmethod
    async def start(cls, config: WorkerConfig) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        process = start_child("baton.runtime.worker", config, [theirs], QUIET_WAITING)
        return cls(WorkerEpoch(config.epoch), process, await Channel.open(ours))

    def kill(self) -> str:
        """Dead for certain when this returns. Says how it ended."""
        died = self.process.poll()
        if died is None:
            self.process.kill()
        self.process.wait(timeout=30)
        self.channel.close()
        return exit_text(died)


class Engine:
    def __init__(self, config: EngineConfig, front: Channel, supervisor: Channel) -> None:
        self._config = config
        self._front = front
        self._supervisor = supervisor
        self._worker: WorkerProcess | None = None
        self._hello: WorkerHello | None = None
        self._driver: Driver[Event, Effect] | None = None
        self._stats_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Until the front is gone."""
        try:
            await self._start_worker(WorkerEpoch(1))
            self._spawn(self._serve_front())
            await self._over
        finally:
            if self._worker is not None:
                self._worker.kill()

    def _spawn(self, work: object) -> None:
        """A task whose failure ends the engine: nothing of ours fails unseen."""
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None and not self._over.done():
            self._over.set_exception(task.exception())  # type: ignore[arg-type]

    # The worker

    async def _start_worker(self, epoch: WorkerEpoch) -> None:
        self._worker = await WorkerProcess.start(replace(self._config.worker, epoch=int(epoch)))
        self._spawn(self._read_worker(self._worker))

    async def _read_worker(self, worker: WorkerProcess) -> None:
        why = ""
        with contextlib.suppress(ProtocolError):
            while (message := await worker.channel.receive()) is not None:
                if type(message) is StepResult:
                    self._tell(StepDone(message))
                elif type(message) is StartFailed:
                    why = message.message
                else:
                    self._on_worker_message(message)
        how = worker.kill()
        if self._worker is not worker:
            return  # it was replaced; its successor is on its way
        if self._driver is None:
            raise EngineError(why or f"the worker {how} before it was ready")
        print(f"baton: the worker {how} {why}".rstrip(), file=sys.stderr, flush=True)
        self._tell(WorkerLost(worker.epoch, why or how))

    def _on_worker_message(self, message: Message) -> None:
        match message:
            case Pong():
                self._front.send(message)
            case LoadProgress() if self._driver is None:
                self._supervisor.send(message)
            case WorkerHello() if self._driver is None:
                self._begin(message)
            case WorkerHello():
                self._tell(WorkerReady(message.epoch, message.pool_kept))

    def _begin(self, hello: WorkerHello) -> None:
        """The first worker is ready: now the size of the pool is known, and the instance exists."""
        config = self._config.instance
        instance = Instance(replace(config, kv=replace(config.kv, blocks=hello.blocks, block_size=hello.block_size)))
        ports: dict[type[Any], Callable[[Any], None]] = {
            RunStep: self._run_step,
            Emit: self._front.send,
            Refuse: lambda effect: self._front.send(RefusedRequest(effect.request, effect.refused)),
            RestartWorker: self._restart_worker,
            ModeChanged: lambda effect: self._front.send(ModeReport(effect.mode.value)),
        }
        self._driver = Driver(instance, ports, Tick())
        ready = InstanceReady(hello.blocks, hello.block_size, config.scheduler.slots, hello.vocab_size, hello.context_tokens)
        self._front.send(ready)
        self._supervisor.send(ready)
        self._tell(WorkerReady(hello.epoch, hello.pool_kept))

    def _run_step(self, effect: RunStep) -> None:
        if self._worker is not None:
            self._worker.channel.send(effect.plan)

    def _restart_worker(self, effect: RestartWorker) -> None:
        print(f"baton: starting another worker ({effect.reason})", file=sys.stderr, flush=True)
        old, self._worker = self._worker, None
        if old is not None:
            old.kill()
        self._spawn(self._start_worker(effect.epoch))

    # The front

    async def _serve_front(self) -> None:
        while (message := await self._front.receive()) is not None:
            self._on_front_message(message)
        if not self._over.done():
            self._over.set_result(None)

    def _on_front_message(self, message: Message) -> None:
        match message:
            case GenerateRequest():
                self._tell(Submit(message))
            case AbortRequest(request, index, reason):
                self._tell(Abort(RequestId(request), index, FinishReason.STOP if reason == "stop" else FinishReason.ABORT))
            case Ping():
                if self._worker is not None:
                    self._worker.channel.send(message)
            case PauseInstance(seconds):
                self._tell(Pause(seconds))
            case ResumeInstance():
                self._tell(Resume())

    def _tell(self, event: Event) -> None:
        if self._driver is None:
            return
        self._driver.tell(event)
        instance, now = self._driver.machine, self._loop.time()
        if now - self._stats_at > STATS_SECONDS or not instance.in_flight:  # type: ignore[attr-defined]
            self._stats_at = now
            self._front.send(snapshot(instance))  # type: ignore[arg-type]


async def serve(config: EngineConfig, sockets: list[socket.socket]) -> None:
    front, supervisor = [await Channel.open(sock) for sock in sockets]
    try:
        await Engine(config, front, supervisor).run()
    except EngineError as error:
        supervisor.send(StartFailed(str(error)))
        await asyncio.sleep(0.05)  # let it out before the process ends
        sys.exit(1)


def main() -> None:
    config, sockets = begin_child(EngineConfig)
    asyncio.run(serve(config, sockets))


if __name__ == "__main__":
    main()
