"""Deadlines for calls that have none: they run on a thread of their own, and whoever waits for one may stop waiting.

A lane is such a thread with the memory that its calls read and write. A call that takes too long keeps its lane, memory
included, until it ends; the caller's own memory is never in such a call's hands. When all lanes are stuck, nothing starts.

A lane runs its calls in order, so a second one can be started before the answer to the first is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, LifoQueue, SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from baton.kvcache.storage.backend import Deadline

Answer = TypeVar("Answer")


class PoolCall(Generic[Answer]):
    __slots__ = ("answer", "cancelled", "work")

    def __init__(self, work: Callable[[], Answer]) -> None:
        self.work = work
        self.answer: SimpleQueue[Any] = SimpleQueue()
        self.cancelled = False


class PoolThread:
    def __init__(self, memory: memoryview, address: int, idle: LifoQueue[PoolThread]) -> None:
        self.memory, self.address, self._idle = memory, address, idle
        self._calls: SimpleQueue[PoolCall[Any] | None] = SimpleQueue()
        self._open: list[PoolCall[Any]] = []
        "Started and not yet waited for, by whoever has the lane now."
        # A daemon: a call that never comes back must not keep the process from ending.
        Thread(target=self._run, name="kv-storage-lane", daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.answer.put(None if call.cancelled else call.work())
            except Exception as error:
                call.answer.put(error)

    def start(self, work: Callable[[], Answer]) -> PoolCall[Answer]:
        call = PoolCall(work)
        self._open.append(call)
        self._calls.put(call)
        return call

    def wait(self, call: PoolCall[Answer], deadline: Deadline) -> Answer:
        """Raises TimeoutError at the deadline, and what the call raised."""
        try:
            answer = call.answer.get(timeout=deadline.left())
        except Empty:
            raise TimeoutError
        self._open.remove(call)
        if isinstance(answer, Exception):
            raise answer
        result: Answer = answer
        return result

    def call(self, work: Callable[[], Answer], deadline: Deadline) -> Answer:
        return self.wait(self.start(work), deadline)

    def give_back(self) -> None:
        """Idle at once, or when what was abandoned has ended."""
        if not self._open:
            self._idle.put(self)
            return
        for call in self._open:
            call.cancelled = True
        self._open = []
        self._calls.put(PoolCall(lambda: self._idle.put(self)))

    def end(self) -> None:
        self._calls.put(None)


class ThreadPool:
    def __init__(self, memory: Sequence[tuple[memoryview, int]]) -> None:
        """One lane for each piece of memory, given with its address."""
        self._idle: LifoQueue[PoolThread] = LifoQueue()  # The one used last: its memory is still in the processor's caches.
        self._all = [PoolThread(view, address, self._idle) for view, address in memory]
        for lane in self._all:
            self._idle.put(lane)

    @contextmanager
    def one(self, deadline: Deadline) -> Iterator[PoolThread]:
        """A lane that nobody uses."""
        try:
            lane = self._idle.get(timeout=deadline.left())
        except Empty:
            raise TimeoutError
        try:
            yield lane
        finally:
            lane.give_back()

    def end(self) -> None:
        for lane in self._all:
            lane.end()
