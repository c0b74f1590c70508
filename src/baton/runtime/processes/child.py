"""One life of a child: its process, its channels, and how it ended.

A row of the table with several ranks has a RankSet in place of a Child: as many processes that live and die together. Messages
to the set go to all of its ranks; messages of a rank arrive with that rank's own Child.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from baton.core.child_loss import cause_of_loss, is_memory_kill
from baton.core.events import LossCause
from baton.core.worker_set import RankEnds
from baton.errors import EngineError
from baton.protocol.codec import Message, encode
from baton.runtime.processes.children import exit_text, has_ended
from baton.runtime.processes.memory_kills import MemoryKillLog
from baton.runtime.processes.process_table import ChildRow
from baton.runtime.wire.channel import Channel

KILL_SECONDS = 30.0
"""Seconds that a killed process may take to end: a large one takes seconds to free its memory."""


class Loss(NamedTuple):
    """The end of a child that was not asked to end."""

    text: str
    "Text for users: the child's own error, or how it ended."
    cause: LossCause
    code: int | None = None
    "Exit status; negative: the signal."


class ToAll:
    """The control channels of all ranks: a message is encoded once and sent to each."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels

    def send(self, message: Message) -> None:
        """Send to all or, if the message is too large (MessageTooLarge), to none."""
        frame = encode(message)
        for channel in self._channels:
            channel.send_frame(frame)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


class Child:
    control: Channel | ToAll

    def __init__(
        self,
        row: ChildRow[Any],
        life: int,
        process: subprocess.Popen[bytes],
        control: Channel | ToAll,
        descriptors: socket.socket | None,
        memory: MemoryKillLog,
        rank: int = 0,
    ) -> None:
        self.row = row
        self.name = row.name
        self.title = f"the {row.name} process"
        "Name of the process in messages for users."
        self.life = life
        self.rank = rank
        self.ranks: tuple[Child, ...] = (self,)
        "Processes of the set, by rank."
        self.whole: Child = self
        "The set of the child."
        self.process = process
        self.control = control
        self.descriptors = descriptors
        self.last_words = ""
        "The error that the child reported."
        self.unwanted = False
        "Whether we are ending the child: then its end is not a loss."
        self.broken = False
        """Whether a message has broken the protocol, or ranks have contradicted each other. Messages that were not read yet are
        dropped: they may rest on the same fault."""
        self.reached: set[str] = set()
        "Milestones of the start that the child has reported (runtime/engine/startup.py)."
        self.silent_seconds = 0.0
        "Seconds without an answer for which we killed the child (silence_watch.py). 0: we did not."
        self._ready_at: float | None = None
        self._memory = memory

    def set_last_words(self, text: str) -> None:
        """Store the error that the child reports."""
        self.last_words = f"rank {self.rank}: {text}" if self.whole is not self else text

    def abandon(self) -> None:
        """Mark the child as ending by our order: its end is not a loss from now on."""
        self.unwanted = True

    def kill(self) -> None:
        self.process.kill()

    async def end_after(self, first: Child, grace_seconds: float) -> Loss:
        """End all processes, because the control channel of `first` has ended, and report how that one did."""
        return await self.end(grace_seconds)

    def has_reached(self, milestone: str) -> bool:
        return all(milestone in rank.reached for rank in self.ranks)

    def awaited(self, milestone: str) -> str:
        """The ranks that have not reported the milestone, in words. A rank that is ready has passed all others."""
        late = [rank for rank in self.ranks if rank.reached.isdisjoint((milestone, "ready"))]
        if len(self.ranks) == 1 or not late:
            return f"the {self.name}"
        *others, last = [str(rank.rank) for rank in late]
        return f"{'ranks' if others else 'rank'} {', '.join(others)}{' and ' if others else ''}{last} of the {self.name}"

    def mark_ready(self) -> None:
        self._ready_at = asyncio.get_running_loop().time()

    @property
    def ready_seconds(self) -> float:
        """Seconds from being ready to the last sign of life."""
        if self._ready_at is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._ready_at - self.silent_seconds

    async def end(self, grace_seconds: float = 0.0) -> Loss:
        """End the child. It is dead for certain when this returns: none of its code runs any more."""
        self.close()
        if await has_ended(self.process, grace_seconds):
            code, kills = self.process.returncode, self._memory.since()
            if self.silent_seconds:
                return Loss(f"said nothing for {self.silent_seconds:.0f} s and was killed", "timeout", code)
            text = "was killed by the kernel for want of memory" if is_memory_kill(code, *kills) else exit_text(code)
            return Loss(text, cause_of_loss(code, *kills), code)
        self.process.kill()
        if not await has_ended(self.process, KILL_SECONDS):
            pid = self.process.pid
            raise EngineError(f"{self.title} ({pid}) is still there {KILL_SECONDS:g} s after it was killed")
        return Loss("stopped talking and was killed" if grace_seconds else "was killed", "died")

    async def finish(self, seconds: float, hurried: Callable[[], bool]) -> None:
        """Ask the child to end; kill it if it does not."""
        self.abandon()
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


class RankSet(Child):
    """The ranks of one row. The end of one of them is the end of all."""

    def __init__(self, row: ChildRow[Any], life: int, ranks: Sequence[Child], memory: MemoryKillLog) -> None:
        channels = [rank.control for rank in ranks if isinstance(rank.control, Channel)]
        super().__init__(row, life, ranks[0].process, ToAll(channels), ranks[0].descriptors, memory)
        self.ranks = tuple(ranks)
        self._ends = RankEnds(len(ranks))
        for rank in ranks:
            rank.whole = self
            rank.title = f"rank {rank.rank} of the {row.name}"

    def abandon(self) -> None:
        self.unwanted = True
        for rank in self.ranks:
            rank.abandon()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    @property
    def ready_seconds(self) -> float:
        return min(rank.ready_seconds for rank in self.ranks)

    async def end(self, grace_seconds: float = 0.0) -> Loss:
        """Kill all ranks without grace: a rank that waits for another one in a collective does not end by itself."""
        self.kill()
        losses = [await rank.end() for rank in self.ranks]
        return losses[0]

    async def end_after(self, first: Child, grace_seconds: float) -> Loss:
        for other in self._ends.ended(first.rank):
            self.ranks[other].abandon()
            self.ranks[other].kill()
        loss = await first.end(grace_seconds)
        for rank in self.ranks:
            await rank.end()
        self.title, self.last_words = first.title, first.last_words
        return loss

    async def finish(self, seconds: float, hurried: Callable[[], bool]) -> None:
        await asyncio.gather(*(rank.finish(seconds, hurried) for rank in self.ranks))

    def close_descriptors(self) -> None:
        for rank in self.ranks:
            rank.close_descriptors()
