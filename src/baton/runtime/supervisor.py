"""`baton serve`: starts front and engine, tells of progress, and ends everything in order.

    supervisor
      |-- front     HTTP, tokenizer                    ends: drains, then closes the engine's channel
      |     `-- templates   renders chat templates     ends: with the front
      `-- engine    the instance machine               ends: when the front's channel closes
            `-- worker    the model                    ends: with the engine

A child that dies is seen at once, said, and everything else is ended: no orphan, no leftover. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Callable

from baton.config import ServeConfig
from baton.errors import EngineError, Unavailable
from baton.protocol.control import InstanceReady, LoadProgress, StartFailed
from baton.runtime.channel import Channel
from baton.runtime.children import exit_text, has_ended, start_child

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
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._on_stopping = on_stopping
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._hurry = False

    def stop(self) -> None:
        """End in order: running requests may finish, within drain_seconds_max. The second time they end now, with an error."""
        self._hurry = self._stop.is_set()
        self._stop.set()

    async def run(self) -> None:
        """Until a signal, or until a child is lost (which raises)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        tasks: list[asyncio.Task[None]] = []
        try:
            engine, front = await self._start()
            tasks = [asyncio.create_task(self._watch("engine", engine)), asyncio.create_task(self._watch("front", front))]
            stopping = asyncio.create_task(self._wait_for(self._stop))
            starting = asyncio.create_task(self._start_in_time())
            tasks += [stopping, starting]
            await self._until_over(tasks[0], tasks[1], stopping, starting)
        finally:
            self._on_stopping()
            for task in tasks:
                task.cancel()
            await self._end()

    async def _start(self) -> tuple[Channel, Channel]:
        front_end, engine_end = socket.socketpair()
        ours_engine, theirs_engine = socket.socketpair()
        ours_front, theirs_front = socket.socketpair()
        self._children["engine"] = start_child(self.engine_module, self._config.engine(), [engine_end, theirs_engine])
        self._children["front"] = start_child("baton.runtime.front", self._config, [front_end, theirs_front])
        return await Channel.open(ours_engine), await Channel.open(ours_front)

    async def _until_over(
        self, engine: asyncio.Task[None], front: asyncio.Task[None], stopping: asyncio.Task[None], starting: asyncio.Task[None]
    ) -> None:
        """Returns when told to stop. Raises what was wrong where a child has ended, or the start takes too long."""
        waited = {engine, front, stopping, starting}
        while True:
            done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                return
            if engine in done or front in done:
                break
            starting.result()
        await asyncio.wait({engine, front}, timeout=OTHER_SECONDS)
        # An engine whose front has ended ends well. If it did not, it was the first.
        ended_well = engine.done() and isinstance(engine.exception(), _EndedWell)
        (front if front.done() and (ended_well or not engine.done()) else engine).result()

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
            elif type(message) is InstanceReady and name == "front":
                self._ready.set()
                self._on_ready(message)
            elif type(message) is StartFailed:
                why = message.message
        if why:
            raise EngineError(why)
        process = self._children[name]
        await has_ended(process, 5.0)
        how = f"the {name} process {exit_text(process.returncode)}"
        raise Unavailable(how) if process.returncode else _EndedWell(how)

    async def _end(self) -> None:
        """Front first: it drains. The engine follows when the front's channel closes, the worker when the engine ends."""
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
