"""`baton serve`: starts its children (process_table.py), passes on what they report, and ends everything in order.

A child that dies is seen at once, and said. An engine that was killed (a signal, from wherever) while the server was ready is
started again: the front is handed the socket of the new one, and goes on there with everything that is open. After any other
end, and after too many in a row, everything else is ended: no orphan, no leftover. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace

from baton.config import ServeConfig
from baton.errors import Unavailable
from baton.protocol.codec import Message
from baton.protocol.control import InstanceReady, LoadProgress, ModelChanged
from baton.runtime.child import Child, Loss
from baton.runtime.child_set import ChildSet
from baton.runtime.process_table import SUPERVISOR_CHILDREN

START_SECONDS_MORE = 30.0
"""The front holds itself to start_seconds_max. One that does not even do that is given up after this much more."""


class Supervisor:
    rows = SUPERVISOR_CHILDREN
    "Rehearsals put disturbed programs in some of them."

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
        self._ready: dict[str, None] = {}
        "Children that have been ready."
        self._all_ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._hurry = False
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        scheduler = config.engine().instance.scheduler
        self._children: ChildSet[ServeConfig] = ChildSet(
            self.rows,
            lambda: self._config,
            self,
            restarts_max=scheduler.worker_restarts_max,
            backoff_seconds_max=scheduler.restart_backoff_seconds_max,
        )

    def stop(self) -> None:
        """End in order: running requests may finish, within drain_seconds_max. The second time they end now, with an error."""
        self._hurry = self._stop.is_set()
        self._stop.set()

    async def run(self) -> None:
        """Until a signal, or until a child is lost (which raises)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        stopping, starting = asyncio.create_task(self._stopped()), asyncio.create_task(self._start_in_time())
        try:
            for row in self.rows:
                await self._children.start(row.name)
            await self._until_over({self._over, stopping, starting}, stopping)
        finally:
            self._on_stopping()
            for task in (stopping, starting):
                task.cancel()
            await self._children.end(lambda: self._hurry)

    async def _until_over(self, waited: set[asyncio.Future[None]], stopping: asyncio.Future[None]) -> None:
        """Returns when told to stop. Raises what was wrong where a child has ended for good, or the start takes too long."""
        while stopping in waited:
            done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for task in [] if stopping in done else done:
                task.result()

    async def _stopped(self) -> None:
        await self._stop.wait()

    async def _start_in_time(self) -> None:
        seconds = self._config.start_seconds_max + START_SECONDS_MORE
        try:
            await asyncio.wait_for(self._all_ready.wait(), seconds)
        except TimeoutError:
            raise Unavailable(f"nothing was ready within {seconds:g} s") from None

    # What the children report

    def on_message(self, child: Child, message: Message) -> None:
        if type(message) is LoadProgress:
            self._on_progress(message)
        elif type(message) is ModelChanged:  # another engine begins with these weights
            self._config = replace(self._config, model=message.model)
        elif type(message) is InstanceReady:
            child.mark_ready()
            self._ready[child.name] = None
            if len(self._ready) == len(self.rows) and not self._all_ready.is_set():
                self._all_ready.set()
                self._children.start_is_over()
                self._on_ready(message)

    def on_descriptor(self, child: Child, message: Message, fd: int) -> None:
        os.close(fd)  # nobody sends us any

    def on_started(self, child: Child) -> None:
        pass

    def on_lost(self, child: Child, loss: Loss) -> None:
        self._on_restart(loss.text)

    def on_over(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)
            self._over.exception()  # seen, even if we are told to stop meanwhile
