"""Deadlines for calls that have none: each runs on a pool thread, and the caller may stop waiting for it.

A pool thread owns the memory that its calls read and write. A call that takes too long keeps its thread, memory included, until
it ends; such a call never has access to the caller's memory. When all threads are stuck, nothing starts.

A thread runs its calls in order, so a second one can be started before the answer to the first is used.
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
        "Calls started and not yet waited for, by the thread's present user."
        # a daemon, because a call that never returns must not keep the process from ending
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
        """Wait for the call. Raises TimeoutError at the deadline, or the call's own error."""
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

    def release(self) -> None:
        """Return the thread to the idle pool, after abandoned calls have finished."""
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
        """One thread for each piece of memory, given with its address."""
        self._idle: LifoQueue[PoolThread] = LifoQueue()  # LIFO: the memory used last is still in the processor's caches
        self._all = [PoolThread(view, address, self._idle) for view, address in memory]
        for lane in self._all:
            self._idle.put(lane)

    @contextmanager
    def idle_thread(self, deadline: Deadline) -> Iterator[PoolThread]:
        """Take an idle thread."""
        try:
            lane = self._idle.get(timeout=deadline.left())
        except Empty:
            raise TimeoutError
        try:
            yield lane
        finally:
            lane.release()

    def end(self) -> None:
        for lane in self._all:
            lane.end()
