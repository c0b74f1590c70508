"""The children of one process, as their table defines (process_table.py): started, watched, restarted, ended.

Supervisor and engine share this code; both know of a child only its row and its messages.

A child that ends before the start is complete ends the start. A child lost later is restarted as its row defines, or its parent
ends; if two with a channel to each other end, the one that failed is to blame.

To send a descriptor to a child with a descriptor socket, the parent calls `send_descriptor(child.descriptors, message, fd)`, in
`on_started` if the child needs it from the beginning, and the child receives it with `receive_descriptor` or
`wait_for_descriptor` (descriptors.py). `on_descriptor` receives those that the child sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol

from baton.core.restarts import Restarts
from baton.errors import ChildKilled, EngineError, PeerError, Unavailable
from baton.protocol.codec import Message
from baton.protocol.control import Pong, StartFailed
from baton.protocol.pool import PeerSocket
from baton.runtime.processes.child import KILL_SECONDS, Child, Loss, RankSet
from baton.runtime.processes.children import has_ended, start_child
from baton.runtime.processes.memory_kills import MemoryKillLog
from baton.runtime.processes.process_table import CONTROL, DESCRIPTORS, KILLED_BELOW, ChildRow, ParentConfig, Restart
from baton.runtime.processes.silence_watch import SilenceWatch
from baton.runtime.wire.channel import Channel
from baton.runtime.wire.descriptors import send_descriptor, take_descriptor

OTHER_SECONDS = 2.0
"""Seconds within which the second of two connected children ends after the first. The cause shows when both have."""


class Parent(Protocol):
    """Callbacks to the owner of a ChildSet. An error in a callback ends the owner: on_over. Of a row with several ranks,
    messages and descriptors come with the child of their rank; start and loss are those of the whole set."""

    def on_message(self, child: Child, message: Message) -> None: ...

    def on_descriptor(self, child: Child, message: Message, fd: int) -> None:
        """Receive a descriptor, which the parent owns from now on."""
        ...

    def on_started(self, child: Child) -> None: ...

    def on_lost(self, child: Child, loss: Loss) -> None:
        """Called when the child is dead, and another is started as its row defines."""
        ...

    def on_over(self, error: BaseException) -> None:
        """Called when a child was lost for good, or our own code failed: the parent ends."""
        ...


class ChildSet(Generic[ParentConfig]):
    def __init__(
        self,
        rows: Sequence[ChildRow[ParentConfig]],
        config: Callable[[], ParentConfig],
        parent: Parent,
        *,
        restarts_max: int,
        backoff_seconds_max: float,
    ) -> None:
        self._rows = {row.name: row for row in rows}
        self._config = config
        self._parent = parent
        unlimited = (Restart.ALWAYS, Restart.IF_FAILED)
        self._restarts = {
            row.name: Restarts(None if row.restart in unlimited else restarts_max, backoff_seconds_max) for row in rows
        }
        self.hangs = {row.name: 0 for row in rows if row.silent_seconds_max is not None}
        "How often each watched child was killed because its event loop did not answer."
        self._living: dict[str, Child] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        "All processes that may still run, including those being replaced."
        self._lives = dict.fromkeys(self._rows, 0)
        self._unclaimed: dict[tuple[str, str], socket.socket] = {}
        "Ends of channels for children that do not exist yet: (owner, peer)."
        self._lost: dict[str, Exception] = {}
        "Children that are not restarted, each with the reason."
        self._starting = True
        self._memory = MemoryKillLog()
        self._replacing = asyncio.Lock()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    def get(self, name: str) -> Child | None:
        return self._living.get(name)

    def process_ids(self) -> list[int]:
        """Ids of all processes that this class waits for."""
        return [process.pid for process in self._processes]

    def start_is_over(self) -> None:
        """End the start: lost children are restarted from now on, as their rows define."""
        self._starting = False
        self._spawn(self._memory.sample_forever())

    async def start(self, name: str, life: int | None = None) -> Child:
        row, config = self._rows[name], self._config()
        life = self._lives[name] = self._lives[name] + 1 if life is None else life
        count, settings = row.ranks(config), row.config(config, life)
        ranks = [await self._start_process(row, row.of_rank(settings, rank), rank) for rank in range(count)]
        child = self._living[name] = ranks[0] if count == 1 else RankSet(row, life, ranks, self._memory)
        for rank in reversed(ranks):
            if rank.descriptors is not None:
                asyncio.get_running_loop().add_reader(rank.descriptors, self._read_descriptor, rank)
            self._watches[name] = self._spawn(self._watch(rank))
        self._parent.on_started(child)
        return child

    async def _start_process(self, row: ChildRow[ParentConfig], settings: object, rank: int) -> Child:
        """Create the child's socket pairs and start its process. Its peers get their ends of the channels."""
        with contextlib.ExitStack() as undo:
            pairs = {other: socket.socketpair() for other in self._sockets_of(row)}
            ours = {other: undo.enter_context(pair[0]) for other, pair in pairs.items()}
            theirs = {other: pair[1] for other, pair in pairs.items()}
            theirs |= {peer: self._unclaimed.pop((row.name, peer)) for peer in row.peers}
            process = start_child(row.module, settings, theirs, row.environment)
            undo.pop_all()
        self._processes = [*(old for old in self._processes if old.poll() is None), process]
        control, link = ours.pop(CONTROL), ours.pop(DESCRIPTORS, None)
        for other, sock in ours.items():
            self._send_socket(other, row.name, sock)
        if link is not None:
            link.setblocking(False)
        return Child(row, self._lives[row.name], process, await Channel.open(control), link, self._memory, rank)

    def _sockets_of(self, row: ChildRow[ParentConfig]) -> list[str]:
        """Names of the socket pairs that a new child needs. Children that name it as a peer get an end each."""
        wanting = [other.name for other in self._rows.values() if row.name in other.peers]
        return [CONTROL, *([DESCRIPTORS] if row.descriptors else []), *wanting]

    def _send_socket(self, whose: str, to: str, sock: socket.socket) -> None:
        """Send the child `whose` its end of a channel to the child `to`, or keep it until `whose` is started."""
        owner = self._living.get(whose)
        if owner is not None and owner.descriptors is not None:
            with sock:
                send_descriptor(owner.descriptors, PeerSocket(to), sock.fileno())
        else:
            self._unclaimed[whose, to] = sock

    def replace(self, name: str, life: int, wanted: Callable[[], Awaitable[bool]]) -> None:
        """Replace a child by order: the present one is dead before the next one is started. `wanted` is asked in
        between."""
        old = self._living.pop(name, None)
        if old is not None:
            old.abandon()
        self._spawn(self._replace(old, name, life, wanted))

    async def _replace(self, old: Child | None, name: str, life: int, wanted: Callable[[], Awaitable[bool]]) -> None:
        async with self._replacing:
            if old is not None:
                await old.end()
            if await wanted():
                await self.start(name, life)

    async def stop(self, child: Child) -> None:
        """Stop a child by order: it is dead when this returns, and none follows until one is started."""
        child.abandon()
        if self._living.get(child.name) is child:
            del self._living[child.name]
        async with self._replacing:
            await child.end()

    # Watching

    async def _watch(self, child: Child) -> None:
        """Pass the child's messages to the parent until its channel ends; then wait for its end and apply the restart rule."""
        limit = child.row.silent_seconds_max
        silence = None if limit is None else SilenceWatch(child, limit)

        def take(message: Message) -> None:
            if type(message) is StartFailed:
                child.set_last_words(message.message)
            elif silence is not None and type(message) is Pong:
                silence.answered()
            elif not child.whole.broken:
                try:
                    self._parent.on_message(child, message)
                except PeerError:
                    child.whole.broken = True  # at once: other ranks' messages may be read before this one's end is noticed
                    raise

        assert isinstance(child.control, Channel)
        try:
            await child.control.listen(take)
        except PeerError as error:
            child.last_words, child.whole.broken = str(error), True
        finally:
            if silence is not None:
                silence.close()
        if child.unwanted:
            return
        whole = child.whole
        loss = await whole.end_after(child, child.row.exit_seconds)
        if self._living.get(child.name) is whole:
            del self._living[child.name]
        self._on_end(whole, loss._replace(cause="protocol") if whole.broken else loss)

    def _read_descriptor(self, child: Child) -> None:
        assert child.descriptors is not None
        try:
            received = take_descriptor(child.descriptors)
            if received is None:
                child.close_descriptors()
            else:
                self._parent.on_descriptor(child, *received)
        except PeerError as error:
            child.last_words = str(error)
            child.close()
        except Exception as error:
            self._parent.on_over(error)

    def _on_end(self, child: Child, loss: Loss) -> None:
        """Apply the restart rule of the child's row: report the loss and restart it, or end the parent."""
        when = " before it was ready" if self._starting else ""
        reported = loss._replace(text=child.last_words or f"{child.title} {loss.text}{when}")
        if loss.cause == "timeout":
            self.hangs[child.name] += 1
        rule, killed = child.row.restart, (loss.code or 0) < 0 or loss.code == KILLED_BELOW
        ended_well = rule is Restart.IF_FAILED and loss.code == 0
        if self._starting or self._lost or rule is Restart.NEVER or (rule is Restart.IF_KILLED and not killed) or ended_well:
            self._lose(child, reported)
        elif rule is Restart.ORDERED:
            self._parent.on_lost(child, reported)
        elif (delay := self._restarts[child.name].next_delay(child.ready_seconds)) is None:
            self._lose(child, reported)
        else:
            self._parent.on_lost(child, reported)
            self._spawn(self._start_again(child.name, delay))

    async def _start_again(self, name: str, delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        try:
            await self.start(name)
        except OSError as error:
            raise Unavailable(f"the {name} was lost, and another cannot be started: {error}") from None

    def _lose(self, child: Child, loss: Loss) -> None:
        """End the parent: the child is lost for good."""
        first = not self._lost
        if child.last_words:
            self._lost[child.name] = EngineError(child.last_words)
        elif loss.code == 0:
            self._lost[child.name] = _EndedWell(loss.text)
        else:
            self._lost[child.name] = (ChildKilled if loss.cause == "killed" else Unavailable)(loss.text)
        if first:
            self._spawn(self._conclude(child.row))

    async def _conclude(self, first: ChildRow[ParentConfig]) -> None:
        for child in self._living.values():
            child.close_descriptors()  # no peer is restarted: none need be awaited
        peers = [row.name for row in self._rows.values() if row.name in first.peers or first.name in row.peers]
        watches = [self._watches[name] for name in peers if name in self._living]
        if watches:
            await asyncio.wait(watches, timeout=OTHER_SECONDS)
        errors = [self._lost[name] for name in self._rows if name in self._lost]
        self._parent.on_over(next((error for error in errors if not isinstance(error, _EndedWell)), errors[-1]))

    # The end

    async def end(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """End all children, the last row first. Nothing is started any more, and no process is left when this returns."""
        for task in self._tasks:
            task.cancel()
        for child in self._living.values():
            child.close_descriptors()
        for row in reversed(self._rows.values()):
            if row.name in self._living:
                await self._living[row.name].finish(row.end_seconds(self._config()), hurried)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                await has_ended(process, KILL_SECONDS)
        for sock in self._unclaimed.values():
            sock.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task whose failure ends the parent: no error of ours is lost."""
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._parent.on_over(error)


class _EndedWell(Unavailable):
    """Raised when a child exited by itself, without an error."""
