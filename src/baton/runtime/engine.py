"""The engine process: the instance machine on a real loop, between the front's channel and the worker's.

    front --requests, aborts, pings--> ENGINE --plans--> worker
          <--tokens, ends, numbers---         <-results-

It starts its worker and starts another when that one is lost; the machine decides, this file acts.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, NamedTuple

from baton.config import EngineConfig, WorkerConfig
from baton.core.effects import Effect, ModeChanged, Refuse, RestartWorker, RunStep
from baton.core.engine.instance import Instance
from baton.core.engine.worker_watch import WorkerState
from baton.core.events import Abort, Event, LossCause, Pause, Resume, StepDone, Submit, Tick, WorkerLost, WorkerReady
from baton.errors import EngineError, InvariantBroken, PeerError
from baton.observe.logs import configure
from baton.protocol.codec import Message
from baton.protocol.control import (
    AbortRequest,
    InstanceReady,
    LoadProgress,
    ModeReport,
    OrderAnswer,
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
from baton.protocol.request import FinishReason, GenerateBatch, GenerateRequest
from baton.protocol.step import StepResult
from baton.runtime.channel import Channel
from baton.runtime.children import begin_child, exit_text, has_ended, keep_what_is_here, out_of_memory_kills, start_child
from baton.runtime.driver import Driver
from baton.runtime.snapshot import snapshot

logger = logging.getLogger("baton.engine")

KILL_SECONDS = 30.0
"""A killed worker is gone long before this; a large one takes seconds to give its memory back."""

EXIT_SECONDS = 1.0
"""A worker whose channel has closed may take this long to end by itself, so that its exit status can be told."""

NUMBERS_SECONDS = 0.2
"""While there is work the front's numbers are at most this old; when there is none they are told at once."""

CHECK_SECONDS = 10.0
"""An idle engine checks its books at most this often."""

QUIET_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0", "OPENBLAS_NUM_THREADS": "1"}
"""Threads of the worker sleep while they wait: on few cores a spinning one takes its neighbour's time."""


OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class WorkerExit(NamedTuple):
    how: str
    cause: LossCause


class WorkerProcess:
    """One life of the worker."""

    def __init__(self, epoch: WorkerEpoch, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.epoch = epoch
        self.process = process
        self.channel = channel
        self._memory_kills = out_of_memory_kills()

    @classmethod
    async def start(cls, module: str, config: WorkerConfig) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        process = start_child(module, config, [theirs], QUIET_WAITING)
        return cls(WorkerEpoch(config.epoch), process, await Channel.open(ours))

    async def end(self, grace_seconds: float = 0.0) -> WorkerExit:
        """Dead for certain when this returns: no plan of it is executed any more."""
        self.channel.close()
        if await has_ended(self.process, grace_seconds):
            code = self.process.returncode
            return WorkerExit(exit_text(code), "killed" if self._from_outside(code) else "died")
        self.process.kill()
        if not await has_ended(self.process, KILL_SECONDS):
            raise EngineError(f"the worker (process {self.process.pid}) is still there {KILL_SECONDS:g} s after it was killed")
        return WorkerExit("stopped talking and was killed" if grace_seconds else "was killed", "died")

    def _from_outside(self, code: int) -> bool:
        """No fault of a worker sends it these signals, but for the kernel when memory is short, and that one counts."""
        return -code in OUTSIDE_SIGNALS and out_of_memory_kills() == self._memory_kills


class Engine:
    worker_module = "baton.runtime.worker"
    "What a worker process runs. Rehearsals put a disturbed one in its place."

    def __init__(self, config: EngineConfig, front: Channel, supervisor: Channel) -> None:
        self._instance_config = config.instance
        self._worker_config = config.worker
        self._front = front
        self._supervisor = supervisor
        self._worker: WorkerProcess | None = None
        self._replacing = asyncio.Lock()
        self._instance: Instance | None = None
        self._driver: Driver[Event, Effect] | None = None
        self._numbers_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._check_due = 0.0
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Until the front is gone, or the supervisor."""
        try:
            await self._start_worker(WorkerEpoch(1))
            self._spawn(self._serve_front())
            self._spawn(self._watch_supervisor())
            await self._over
        finally:
            if self._driver is not None:
                self._driver.close()
            if self._numbers_timer is not None:
                self._numbers_timer.cancel()
            for task in self._tasks:
                task.cancel()
            if self._worker is not None:
                await self._worker.end()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task whose failure ends the engine: nothing of ours fails unseen."""
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    # The worker

    async def _start_worker(self, epoch: WorkerEpoch) -> None:
        config = replace(self._worker_config, epoch=int(epoch))
        worker = self._worker = await WorkerProcess.start(self.worker_module, config)
        self._spawn(self._read_worker(worker))

    async def _read_worker(self, worker: WorkerProcess) -> None:
        why = ""

        def take(message: Message) -> None:
            nonlocal why
            if type(message) is StepResult:
                self._tell(StepDone(message))
            elif type(message) is StartFailed:
                why = message.message
            else:
                self._on_worker_message(worker, message)

        broken = False
        try:
            await worker.channel.listen(take)
        except PeerError as error:
            why, broken = str(error), True
        if self._worker is not worker:
            return  # it was replaced, and is being ended
        how, cause = await worker.end(EXIT_SECONDS)
        if self._driver is None:
            raise EngineError(why or f"the worker {how} before it was ready")
        logger.warning("the worker %s", f"{how} {why}".rstrip())
        self._tell(WorkerLost(worker.epoch, why or how, "protocol" if broken else cause))

    def _on_worker_message(self, worker: WorkerProcess, message: Message) -> None:
        match message:
            case Pong():
                self._front.send(message)
            case LoadProgress() if self._driver is None:
                self._supervisor.send(message)
            case WorkerHello() if self._driver is None:
                self._begin(message)
            case WorkerHello():
                self._on_next_hello(worker, message)

    def _begin(self, hello: WorkerHello) -> None:
        """The first worker is ready: now the size of the pool is known, and the instance exists."""
        config = self._instance_config
        kv = replace(config.kv, blocks=hello.blocks, block_size=hello.block_size)
        instance = self._instance = Instance(replace(config, kv=kv))
        self._worker_config = replace(self._worker_config, blocks=hello.blocks)  # its successors have the same pool, or fail
        ports: dict[type[Any], Callable[[Any], None]] = {
            RunStep: self._run_step,
            Emit: self._front.send,
            Refuse: lambda effect: self._front.send(RefusedRequest(effect.request, effect.refused)),
            RestartWorker: self._restart_worker,
            ModeChanged: lambda effect: self._front.send(ModeReport(effect.mode.value)),
            OrderAnswer: self._front.send,
        }
        self._driver = Driver(instance, ports, self._on_due)
        keep_what_is_here()
        ready = InstanceReady(
            hello.blocks,
            hello.block_size,
            config.scheduler.slots,
            hello.vocab_size,
            hello.context_tokens,
            hello.model_context_tokens,
            hello.sampling_defaults,
            hello.identity,
        )
        self._front.send(ready)
        self._supervisor.send(ready)
        if hello.digest_seconds:
            logger.info("digest of the weights: %.1f s beside loading, kept for the next start", hello.digest_seconds)
        self._tell(WorkerReady(hello.epoch, hello.pool, hello.identity))

    def _on_next_hello(self, worker: WorkerProcess, hello: WorkerHello) -> None:
        if self._instance is not None and hello.identity != self._instance.fingerprint:
            logger.warning("the model's files have changed: the next worker computes with others, and the cache begins anew")
        self._tell(WorkerReady(worker.epoch, hello.pool, hello.identity))

    def _run_step(self, effect: RunStep) -> None:
        if self._worker is not None:
            self._worker.channel.send(effect.plan)

    def _restart_worker(self, effect: RestartWorker) -> None:
        logger.warning("starting another worker (%s)", effect.reason)
        old, self._worker = self._worker, None
        self._spawn(self._replace_worker(old, effect.epoch, effect.delay_seconds))

    async def _replace_worker(self, old: WorkerProcess | None, epoch: WorkerEpoch, delay_seconds: float) -> None:
        """The old one is dead before the next one lives."""
        async with self._replacing:
            if old is not None:
                await old.end()
            await asyncio.sleep(delay_seconds)
            if self._instance is not None and self._instance.worker.epoch == epoch:  # else that one is lost already
                await self._start_worker(epoch)

    # The front

    async def _serve_front(self) -> None:
        await self._front.listen(self._on_front_message)
        if not self._over.done():
            self._over.set_result(None)

    def _on_front_message(self, message: Message) -> None:
        match message:
            case GenerateRequest():
                self._tell(Submit(message))
            case GenerateBatch():
                for request in message.requests():
                    self._tell(Submit(request))
            case AbortRequest(request, index, reason):
                self._tell(Abort(RequestId(request), index, FinishReason.STOP if reason == "stop" else FinishReason.ABORT))
            case Ping():
                if self._worker is not None:
                    self._worker.channel.send(message)
            case PauseInstance(number, seconds):
                self._tell(Pause(seconds, number))
            case ResumeInstance(number):
                self._tell(Resume(number))

    async def _watch_supervisor(self) -> None:
        while await self._supervisor.receive() is not None:
            pass
        if not self._over.done():
            self._over.set_result(None)

    def _on_due(self) -> None:
        try:
            self._tell(Tick())
        except Exception as error:
            self._fail(error)

    def _tell(self, event: Event) -> None:
        if self._driver is None or self._instance is None:
            return
        self._driver.tell(event)
        if self._instance.worker.state is WorkerState.GONE:  # its requests have their error; who runs us may start us again
            self._fail(EngineError(f"the worker was lost {self._instance.worker.losses} time(s) in a row: the server ends"))
        if self._instance.idle:
            self._check_when_due(self._instance)
        if not self._instance.in_flight:
            self._tell_numbers()
        elif self._numbers_timer is None:
            self._numbers_timer = self._loop.call_later(NUMBERS_SECONDS, self._tell_numbers)

    def _check_when_due(self, instance: Instance) -> None:
        """Nobody waits for us now: prove that nothing leaked. An engine whose state is impossible must not go on."""
        if self._loop.time() >= self._check_due:
            self._check_due = self._loop.time() + CHECK_SECONDS
            try:
                instance.check()
            except InvariantBroken as broken:
                logger.error("the engine found its own state impossible: %s", broken)
                self._fail(broken)

    def _tell_numbers(self) -> None:
        if self._numbers_timer is not None:
            self._numbers_timer.cancel()
            self._numbers_timer = None
        if self._instance is not None:
            self._front.send(snapshot(self._instance))


async def serve(config: EngineConfig, sockets: list[socket.socket], engine: type[Engine] = Engine) -> None:
    front, supervisor = [await Channel.open(sock) for sock in sockets]
    try:
        await engine(config, front, supervisor).run()
    except (EngineError, OSError) as error:
        supervisor.send(StartFailed(str(error) or type(error).__name__))
        await asyncio.gather(front.finish(), supervisor.finish())
        sys.exit(1)


def main(engine: type[Engine] = Engine) -> None:
    config, sockets = begin_child(EngineConfig)
    configure("engine", config.log_level, config.log_format)
    asyncio.run(serve(config, sockets, engine))


if __name__ == "__main__":
    main()
