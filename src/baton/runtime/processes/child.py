"""One life of a child process: its process, its channels, and how it ended."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

from baton.core.child_loss import cause_of_loss, is_memory_kill
from baton.core.events import LossCause
from baton.errors import EngineError
from baton.runtime.processes.children import exit_text, has_ended
from baton.runtime.processes.memory_kills import MemoryKillLog
from baton.runtime.processes.process_table import ChildRow
from baton.runtime.wire.channel import Channel

KILL_SECONDS = 30.0
"""A killed process is gone long before this; a large one takes seconds to free its memory."""


class Loss(NamedTuple):
    """How a child ended that was not asked to end."""

    text: str
    "Text for users: the child's own error, or how it ended."
    cause: LossCause
    code: int | None = None
    "Exit status; negative: the signal."


class Child:
    def __init__(
        self,
        row: ChildRow[Any],
        life: int,
        process: subprocess.Popen[bytes],
        control: Channel,
        descriptors: socket.socket | None,
        memory: MemoryKillLog,
    ) -> None:
        self.row = row
        self.name = row.name
        self.life = life
        self.process = process
        self.control = control
        self.descriptors = descriptors
        self.last_words = ""
        "The error that the child reported."
        self.unwanted = False
        "We are ending it: its end is not a loss."
        self._ready_at: float | None = None
        self._memory = memory

    def mark_ready(self) -> None:
        self._ready_at = asyncio.get_running_loop().time()

    @property
    def ready_seconds(self) -> float:
        return 0.0 if self._ready_at is None else asyncio.get_running_loop().time() - self._ready_at

    async def end(self, grace_seconds: float = 0.0) -> Loss:
        """End the child. It is dead for certain when this returns: none of its code runs any more."""
        self.close()
        if await has_ended(self.process, grace_seconds):
            code, kills = self.process.returncode, self._memory.since()
            text = "was killed by the kernel for want of memory" if is_memory_kill(code, *kills) else exit_text(code)
            return Loss(text, cause_of_loss(code, *kills), code)
        self.process.kill()
        if not await has_ended(self.process, KILL_SECONDS):
            pid = self.process.pid
            raise EngineError(f"the {self.name} (process {pid}) is still there {KILL_SECONDS:g} s after it was killed")
        return Loss("stopped talking and was killed" if grace_seconds else "was killed", "died")

    async def finish(self, seconds: float, hurried: Callable[[], bool]) -> None:
        """Ask the child to end; kill it if it does not."""
        self.unwanted = True
        if not self.row.terminated:
            self.close()
        elif self.process.poll() is None:
            self.process.terminate()
        if not await has_ended(self.process, seconds, unless=hurried):
            if self.row.hurry_seconds and hurried():
                self.process.terminate()
                await has_ended(self.process, self.row.hurry_seconds)
            if self.process.poll() is None:
                self.process.kill()
                await has_ended(self.process, KILL_SECONDS)
        self.close()

    def close(self) -> None:
        self.control.close()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        if self.descriptors is not None and self.descriptors.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.descriptors)
            self.descriptors.close()
