"""`baton serve`: starts front and engine, tells of progress, and ends everything in order.

    supervisor
      |-- front     HTTP, tokenizer                    ends: drains, then closes the engine's channel
      `-- engine    the instance machine               ends: when the front's channel closes
            `-- worker    the model                    ends: with the engine

A child that dies is seen at once, said, and everything else is ended: no orphan, no leftover. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
from collections.abc import Callable

from baton.config import ServeConfig
from baton.errors import EngineError, Unavailable
from baton.protocol.control import InstanceReady, LoadProgress, StartFailed
from baton.runtime.channel import Channel
from baton.runtime.children import exit_text, start_child

KILL_SECONDS = 10.0


class Supervisor:
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
        self._stop = asyncio.Event()

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Until a signal, or until a child is lost (which raises)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        try:
            engine, front = await self._start()
            watchers = [asyncio.create_task(self._watch("engine", engine)), asyncio.create_task(self._watch("front", front))]
            stopping = asyncio.create_task(self._stop.wait())
            done, _ = await asyncio.wait([*watchers, stopping], return_when=asyncio.FIRST_COMPLETED)
            if stopping not in done:
                await next(iter(done))  # raises what was wrong
        finally:
            self._on_stopping()
            await self._end()

    async def _start(self) -> tuple[Channel, Channel]:
        front_end, engine_end = socket.socketpair()
        ours_engine, theirs_engine = socket.socketpair()
        ours_front, theirs_front = socket.socketpair()
        self._children["engine"] = start_child("baton.runtime.engine", self._config.engine(), [engine_end, theirs_engine])
        self._children["front"] = start_child("baton.runtime.front", self._config, [front_end, theirs_front])
        return await Channel.open(ours_engine), await Channel.open(ours_front)

    async def _watch(self, name: str, channel: Channel) -> None:
        """Pass on what the child says. Its end is an error: it was not asked to end."""
        why = ""
        while (message := await channel.receive()) is not None:
            if type(message) is LoadProgress:
                self._on_progress(message)
            elif type(message) is InstanceReady and name == "front":
                self._on_ready(message)
            elif type(message) is StartFailed:
                why = message.message
        if why:
            raise EngineError(why)
        process = self._children[name]
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, 5.0)
        raise Unavailable(f"the {name} process {exit_text(process.returncode)}")

    async def _end(self) -> None:
        """Front first: it drains. The engine follows when the front's channel closes, the worker when the engine ends."""
        for name, seconds in (("front", self._config.drain_seconds_max + KILL_SECONDS), ("engine", KILL_SECONDS)):
            process = self._children.get(name)
            if process is None:
                continue
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if name == "front" else 0)
            try:
                await asyncio.to_thread(process.wait, seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(KILL_SECONDS)
