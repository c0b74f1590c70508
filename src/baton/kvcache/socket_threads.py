"""Threads that block on sockets: many bytes pass at full speed beside the loop, and a stalled peer delays no other.

A thread is stopped by shutting down its connection. The caller that stops it waits until it has returned, within some
milliseconds: from then on the thread touches neither the socket nor a pool, and the error that ended it refers to no memory of
a pool. A second thread beside it computes digests.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Protocol, TypeVar

A = TypeVar("A")
T = TypeVar("T")


class Beside(Protocol):
    """Starts a function in another thread."""

    def __call__(self, work: Callable[[], T], /) -> Future[T]: ...


class SocketThreads:
    """Threads for the sockets of one loop. `most`: connections at once."""

    def __init__(self, most: int) -> None:
        self._threads = ThreadPoolExecutor(2 * most, "baton-bytes")
        self._running: dict[Future[object], socket.socket] = {}

    async def run(self, sock: socket.socket, work: Callable[[Beside], T]) -> T:
        """Run `work` in a thread and return its result. It blocks on `sock` only, and may run one function beside itself. When
        this returns or raises, both have returned."""
        future = self._submit(partial(work, self._submit))
        self._running[future] = sock  # type: ignore[index]
        result = asyncio.wrap_future(future)
        # the error is not retrieved after a cancellation
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(result)
        finally:
            if not future.done():
                shut_down(sock)
                wait([future])
            del self._running[future]  # type: ignore[arg-type]

    def _submit(self, work: Callable[[], T], /) -> Future[T]:
        return self._threads.submit(_without_locals, work)

    def stop(self) -> None:
        """Stop all threads. Their `run` raises the error of a lost connection, or returns."""
        for sock in self._running.values():
            shut_down(sock)
        wait(self._running)

    def close(self) -> None:
        self.stop()
        self._threads.shutdown(wait=False)


def one_ahead(beside: Beside, work: Callable[[A], T], items: Sequence[A], drop: Callable[[T], None]) -> Generator[T]:
    """Results of `work` for each item, in order. While the caller uses a result, the next one is made beside it. Closing the
    iterator waits for that one, and drops it."""
    ahead: Future[T] | None = None
    try:
        for number, item in enumerate(items, 1):
            result = work(item) if ahead is None else ahead.result()
            ahead = beside(partial(work, items[number])) if number < len(items) else None
            yield result
    finally:
        if ahead is not None and ahead.exception() is None:
            drop(ahead.result())


def _without_locals(work: Callable[[], T]) -> T:
    """Run `work`, and clear the frames of its error. The future, the error and the caller's frame refer to one another until
    the garbage collector comes: a view of a pool in one of the error's frames would live as long, and block the pool's end."""
    try:
        return work()
    except BaseException as error:
        at: BaseException | None = error
        while at is not None:
            traceback.clear_frames(at.__traceback__)
            at = at.__context__
        raise


def shut_down(sock: socket.socket) -> None:
    """End the connection. The descriptor stays: the thread that uses it may be within a call."""
    with contextlib.suppress(OSError):  # the connection has ended already
        sock.shutdown(socket.SHUT_RDWR)
