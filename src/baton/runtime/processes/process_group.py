"""A process that runs others until a signal: they are started in the order of their table, and ended in reverse.

`baton serve` (supervisor.py) and `baton up` (up.py) subclass it and handle the messages of their children. Every wait has a
deadline; no process and no socket is left at the end.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Generic

from baton.errors import Unavailable
from baton.protocol.codec import Message
from baton.protocol.control import ChildHangs
from baton.runtime.processes.child import Child, Loss
from baton.runtime.processes.child_set import ChildSet
from baton.runtime.processes.orphans import Orphans
from baton.runtime.processes.private_folder import remove_abandoned, usual_parent
from baton.runtime.processes.process_table import ChildRow, ParentConfig

START_SECONDS_MORE = 30.0
"""Seconds beyond start_seconds_max after which the front's start is ended. The front limits itself to start_seconds_max."""


class ProcessGroup(Generic[ParentConfig]):
    def __init__(
        self,
        rows: Sequence[ChildRow[ParentConfig]],
        config: Callable[[], ParentConfig],
        *,
        start_seconds_max: float | None,
        restarts_max: int,
        backoff_seconds_max: float,
    ) -> None:
        """`start_seconds_max`: None if the start depends on other machines, without a limit."""
        self._rows = rows
        self._start_seconds_max = start_seconds_max
        self._all_ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._hurry = False
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._children: ChildSet[ParentConfig] = ChildSet(
            rows, config, self, restarts_max=restarts_max, backoff_seconds_max=backoff_seconds_max
        )

    def stop(self) -> None:
        """End in order: running requests may finish, within drain_seconds_max. The second call ends them now, with an error."""
        self._hurry = self._stop.is_set()
        self._stop.set()

    def hang_up(self) -> None:
        """Stop, because the terminal is closed. Kernel and shell may both send SIGHUP: it does not count as a second call of
        `stop`."""
        self._stop.set()

    async def run(self) -> None:
        """Run until a signal, or until a child is lost for good (which raises)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
            loop.add_signal_handler(signal.SIGHUP, self.hang_up)
        orphans = Orphans(lambda: self._children.process_ids())
        stopping, starting = asyncio.create_task(self._stopped()), asyncio.create_task(self._start_in_time())
        rows = asyncio.create_task(self._start_rows())
        try:
            await self._until_over({self._over, stopping, starting, rows}, stopping)
        finally:
            for task in (stopping, starting, rows):
                task.cancel()
            try:
                self.on_stopping()
            finally:
                await self._children.end(lambda: self._hurry)
                orphans.close()
                remove_abandoned(usual_parent())  # a child that was killed, in a hurry for one, has left its directory

    async def _until_over(self, waited: set[asyncio.Future[None]], stopping: asyncio.Future[None]) -> None:
        """Return when `stop` was called. Raises the error if a child has ended for good, or the start takes too long."""
        while stopping in waited:
            done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for task in [] if stopping in done else done:
                task.result()

    async def _stopped(self) -> None:
        await self._stop.wait()

    async def _start_rows(self) -> None:
        for row in self._rows:
            await self.before_start(row.name)
            await self._children.start(row.name)

    async def before_start(self, name: str) -> None:
        """Wait until that child may be started. The start as a whole has a deadline."""

    async def _start_in_time(self) -> None:
        if self._start_seconds_max is None:
            await self._all_ready.wait()
            return
        seconds = self._start_seconds_max + START_SECONDS_MORE
        try:
            await asyncio.wait_for(self._all_ready.wait(), seconds)
        except TimeoutError:
            raise Unavailable(f"nothing was ready within {seconds:g} s") from None

    def start_is_over(self) -> bool:
        """Call when all children are ready. True the first time."""
        if self._all_ready.is_set():
            return False
        self._all_ready.set()
        self._children.start_is_over()
        return True

    # Callbacks of the children

    def on_stopping(self) -> None:
        pass

    def on_message(self, child: Child, message: Message) -> None:
        raise NotImplementedError

    def on_descriptor(self, child: Child, message: Message, fd: int) -> None:
        os.close(fd)  # children send no descriptors here

    def on_started(self, child: Child) -> None:
        """Send the counts of hangs to the last row's process, which serves /metrics. They change with a restart only."""
        serving = self._children.get(self._rows[-1].name)
        if serving is not None:
            serving.control.send(ChildHangs(dict(self._children.hangs)))

    def on_lost(self, child: Child, loss: Loss) -> None:
        pass

    def on_over(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)
            self._over.exception()  # retrieve the error, even if we are stopped meanwhile
