"""Deadlines for calls that have none: each runs on a thread of its own, and whoever waits for it may stop waiting.

A lane is such a thread with the memory that its calls read and write. A call that takes too long keeps its lane, memory
included, until it ends; the caller's own memory is never in such a call's hands. When all lanes are stuck, nothing starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from baton.kvcache.storage.backend import Deadline

Answer = TypeVar("Answer")


class _Call:
    __slots__ = ("answer", "claim", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.answer: SimpleQueue[Any] = SimpleQueue()
        self.claim: deque[None] = deque([None])
        "Whoever pops it decides: the lane, that the answer is taken; the caller, that nobody waits any more."

    def claimed(self) -> bool:
        try:
            self.claim.pop()
        except IndexError:
            return False
        return True


class _Lane:
    def __init__(self, memory: memoryview, address: int, idle: SimpleQueue[_Lane]) -> None:
        self.memory, self.address, self._idle = memory, address, idle
        self.calls: SimpleQueue[_Call | None] = SimpleQueue()
        # A daemon: a call that never comes back must not keep the process from ending.
        Thread(target=self._run, name="kv-storage-lane", daemon=True).start()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                answer = call.work()
            except Exception as error:
                answer = error
            if call.claimed():
                call.answer.put(answer)
            else:
                self._idle.put(self)  # Nobody waits any more.


class Lane:
    """A lane while one caller has it."""

    def __init__(self, lane: _Lane) -> None:
        self._lane = lane
        self.memory, self.address = lane.memory, lane.address
        self.abandoned = False

    def call(self, work: Callable[[], Answer], deadline: Deadline) -> Answer:
        """Raises TimeoutError at the deadline, and what `work` raises."""
        call = _Call(work)
        self._lane.calls.put(call)
        try:
            answer = call.answer.get(timeout=deadline.left())
        except Empty:
            if call.claimed():
                self.abandoned = True
                raise TimeoutError
            answer = call.answer.get(timeout=60)  # It came at the last moment.
        if isinstance(answer, Exception):
            raise answer
        result: Answer = answer
        return result


class Lanes:
    def __init__(self, memory: Sequence[tuple[memoryview, int]]) -> None:
        """One lane for each piece of memory, given with its address."""
        self._idle: SimpleQueue[_Lane] = SimpleQueue()
        self._all = [_Lane(view, address, self._idle) for view, address in memory]
        for lane in self._all:
            self._idle.put(lane)

    @contextmanager
    def one(self, deadline: Deadline) -> Iterator[Lane]:
        """A lane that nobody uses. One that is abandoned comes back by itself when its call has ended."""
        try:
            lane = self._idle.get(timeout=deadline.left())
        except Empty:
            raise TimeoutError
        use = Lane(lane)
        try:
            yield use
        finally:
            if not use.abandoned:
                self._idle.put(lane)

    def end(self) -> None:
        for lane in self._all:
            lane.calls.put(None)
