"""Accepts connections on a listening socket: one task per connection, on one loop. The router's cluster port, the transfer port
and the socket of a KV pool share it; they differ in what a task does, and in which connection makes room for another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from typing import Any, Final, Generic, Protocol, TypeVar

T = TypeVar("T")

PAUSE_SECONDS: Final = 0.5
"""Seconds after an accept that failed, as without descriptors: without the delay the loop would do nothing else."""


class ConnectionOwner(Protocol[T]):
    """The owner of an Acceptor: it serves connections, and decides which one makes room for another."""

    def make_room(self, living: list[asyncio.Task[T]]) -> None:
        """Make room before a new connection is served: close one of `living` if there are too many. `living`: connections that
        are not being closed, the oldest first."""
        ...

    def serve_connection(self, sock: socket.socket, place: Any) -> Coroutine[Any, Any, T]: ...

    def on_ended(self, task: asyncio.Task[T], sock: socket.socket) -> None:
        """Close `sock`, because the connection's task ended. The task itself cannot, because a task that is cancelled early
        runs nothing."""
        ...

    def on_accept_failed(self, error: OSError) -> None: ...


class Acceptor(Generic[T]):
    def __init__(self, listener: socket.socket, owner: ConnectionOwner[T]) -> None:
        """`listener` listens already, and is closed with this object."""
        listener.setblocking(False)
        self._listener = listener
        self._owner = owner
        self.open: dict[asyncio.Task[T], socket.socket] = {}
        "Open connections, the oldest first."
        self.task = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, place = await loop.sock_accept(self._listener)
            except OSError as error:
                self._owner.on_accept_failed(error)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self._owner.make_room([task for task in self.open if not task.cancelling()])
            task = asyncio.create_task(self._owner.serve_connection(sock, place))
            self.open[task] = sock
            task.add_done_callback(self._ended)
            await asyncio.sleep(0)  # one per turn: the backlog must not delay the loop's other work

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._owner.on_ended(task, self.open.pop(task))

    def disconnect(self, task: asyncio.Task[T]) -> None:
        """Close a connection: its peer sees the end at once."""
        with contextlib.suppress(OSError):  # the connection ended already
            self.open[task].shutdown(socket.SHUT_RDWR)
        task.cancel()

    def close(self) -> None:
        self.task.cancel()
        self._listener.close()
        for task in self.open:
            task.cancel()
