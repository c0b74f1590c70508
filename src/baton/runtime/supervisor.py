"""`baton serve`: starts front and engine, tells of progress, and ends everything in order.

    supervisor
      |-- front     HTTP, tokenizer                    ends: drains, then closes the engine's channel
      |     `-- templates   renders chat templates     ends: with the front
      `-- engine    the instance machine               ends: when the front's channel closes
            `-- worker    the model                    ends: with the engine

A child that dies is seen at once, and said. An engine that was killed (a signal, from wherever) while the server was ready is
started again: the front is handed the socket of the new one, and goes on there with everything that is open. After any other
end, and after too many in a row, everything else is ended: no orphan, no leftover. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine
from typing import Any

from baton.config import ServeConfig
from baton.errors import EngineError, Unavailable
from baton.protocol.control import InstanceReady, LoadProgress, StartFailed
from baton.runtime.channel import Channel
from baton.runtime.children import exit_text, has_ended, send_socket, start_child
from baton.runtime.restarts import Restarts

KILL_SECONDS = 10.0
"""An engine ends within moments of its front; a front within this of the end of its draining."""

START_SECONDS_MORE = 30.0
"""The front holds itself to start_seconds_max. One that does not even do that is given up after this much more."""

HURRY_SECONDS = 6.0
"""A front that is told to hurry ends its requests with an error and is gone within this."""

OTHER_SECONDS = 2.0
"""When one child has ended the other follows; whose fault it was shows when both have."""


class Supervisor:
    engine_module = "baton.runtime.engine"
    "What the engine process runs. Rehearsals put a disturbed one in its place."

    def __init__(
        self,
        config: ServeConfig,
        on_progress: Callable[[LoadProgress], None] = lambda progress: None,
        on_ready: Callable[[InstanceReady], None] = lambda ready: None,
        on_stopping: Callable[[], None] = lambda: None,
        on_restart: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._on_stopping = on_stopping
        self._on_restart = on_restart
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._hurry = False
        self._tasks: list[asyncio.Task[None]] = []
        self._engines, self._fronts_engines = socket.socketpair()
        "Over it the front is handed the sockets of engines that follow a lost one."
        scheduler = config.engine().instance.scheduler
        self._restarts = Restarts(scheduler.worker_restarts_max, scheduler.restart_backoff_seconds_max)
        self._engine_ready_at: float | None = None

    def stop(self) -> None:
        """End in order: running requests may finish, within drain_seconds_max. The second time they end now, with an error."""
        self._hurry = self._stop.is_set()
        self._stop.set()

    async def run(self) -> None:
        """Until a signal, or until a child is lost (which raises)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        try:
            engine, front = await self._start()
            watches = self._spawn(self._watch("engine", engine)), self._spawn(self._watch("front", front))
            await self._until_over(*watches, self._spawn(self._wait_for(self._stop)), self._spawn(self._start_in_time()))
        finally:
            self._on_stopping()
            for task in self._tasks:
                task.cancel()
            await self._end()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def _start(self) -> tuple[Channel, Channel]:
        front_end, engine = self._start_engine()
        ours, theirs = socket.socketpair()
        sockets = [front_end, theirs, self._fronts_engines]
        self._children["front"] = start_child("baton.runtime.front", self._config, sockets)
        return await Channel.open(engine), await Channel.open(ours)

    def _start_engine(self) -> tuple[socket.socket, socket.socket]:
        """The front's end of its channel, and ours."""
        self._engine_ready_at = None
        front_end, engine_end = socket.socketpair()
        ours, theirs = socket.socketpair()
        self._children["engine"] = start_child(self.engine_module, self._config.engine(), [engine_end, theirs])
        return front_end, ours

    async def _start_another_engine(self, delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        try:
            front_end, ours = self._start_engine()
        except OSError as error:
            raise Unavailable(f"the engine was lost, and another cannot be started: {error}") from None
        send_socket(self._engines, front_end)
        await self._watch("engine", await Channel.open(ours))

    async def _until_over(
        self, engine: asyncio.Task[None], front: asyncio.Task[None], stopping: asyncio.Task[None], starting: asyncio.Task[None]
    ) -> None:
        """Returns when told to stop. Raises what was wrong where a child has ended for good, or the start takes too long."""
        waited = {engine, front, stopping, starting}
        while True:
            done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                return
            if engine in done and front not in done and (another := self._another_engine(engine)) is not None:
                engine = another
                waited.add(engine)
            elif engine in done or front in done:
                break
            elif starting in done:
                starting.result()
        self._engines.close()  # no other engine comes: the front need not wait for one
        await asyncio.wait({engine, front}, timeout=OTHER_SECONDS)
        # An engine whose front has ended ends well. If it did not, it was the first.
        ended_well = engine.done() and isinstance(engine.exception(), _EndedWell)
        (front if front.done() and (ended_well or not engine.done()) else engine).result()

    def _another_engine(self, lost: asyncio.Task[None]) -> asyncio.Task[None] | None:
        """None: this end is the server's. It ended by itself, was still starting, or was not the first to be lost."""
        error = lost.exception()
        if not isinstance(error, _Killed) or not self._ready.is_set():
            return None
        now = asyncio.get_running_loop().time()
        delay = self._restarts.next_delay(0.0 if self._engine_ready_at is None else now - self._engine_ready_at)
        if delay is None:
            return None
        self._on_restart(str(error))
        return self._spawn(self._start_another_engine(delay))

    async def _start_in_time(self) -> None:
        seconds = self._config.start_seconds_max + START_SECONDS_MORE
        try:
            await asyncio.wait_for(self._ready.wait(), seconds)
        except TimeoutError:
            raise Unavailable(f"nothing was ready within {seconds:g} s") from None

    @staticmethod
    async def _wait_for(event: asyncio.Event) -> None:
        await event.wait()

    async def _watch(self, name: str, channel: Channel) -> None:
        """Pass on what the child says. Its end is an error: it was not asked to end."""
        why = ""
        while (message := await channel.receive()) is not None:
            if type(message) is LoadProgress:
                self._on_progress(message)
            elif type(message) is InstanceReady and name == "engine":
                self._engine_ready_at = asyncio.get_running_loop().time()
            elif type(message) is InstanceReady:
                self._ready.set()
                self._on_ready(message)
            elif type(message) is StartFailed:
                why = message.message
        if why:
            raise EngineError(why)
        process = self._children[name]
        await has_ended(process, 5.0)
        how = f"the {name} process {exit_text(process.returncode)}"
        if process.returncode == 0:
            raise _EndedWell(how)
        raise _Killed(how) if process.returncode is not None and process.returncode < 0 else Unavailable(how)

    async def _end(self) -> None:
        """Front first: it drains. The engine follows when the front's channel closes, the worker when the engine ends."""
        self._engines.close()  # an engine that is lost now has no successor
        for name, seconds in (("front", self._config.drain_seconds_max + KILL_SECONDS), ("engine", KILL_SECONDS)):
            process = self._children.get(name)
            if process is None:
                continue
            if name == "front" and process.poll() is None:
                process.terminate()
            if await has_ended(process, seconds, unless=lambda: self._hurry):
                continue
            if name == "front" and self._hurry:
                process.terminate()
                if await has_ended(process, HURRY_SECONDS):
                    continue
            process.kill()
            await has_ended(process, KILL_SECONDS)


class _EndedWell(Unavailable):
    """A child ended without being asked to, and without an error of its own."""


class _Killed(Unavailable):
    """A child was ended by a signal that we did not send."""
