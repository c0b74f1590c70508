"""Requests of one connection: several are open if a client does not wait for an answer before it sends the next request.

uvicorn's protocol remembers only the latest request, and reads nothing while others wait. Without this a client that sends two
requests and disconnects would leave the first one running to its end:

connection lost   all open requests are disconnected, not only the latest
reading paused    the end of the connection cannot be read: the socket's state is polled
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

POLL_SECONDS: Final = 1.0


class PipelinedRequests:
    """Requests of one connection whose answers are not complete, in the order of their arrival."""

    __slots__ = ("_cycles", "_timer")

    def __init__(self) -> None:
        self._cycles: deque[RequestResponseCycle] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, cycle: RequestResponseCycle, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._cycles.append(cycle)
        self._forget_complete()
        if self._timer is None and len(self._cycles) > 1:
            self._timer = loop.call_later(POLL_SECONDS, self._poll, transport, loop)

    def disconnect(self) -> None:
        """The connection is lost: wakes the tasks of all requests."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._forget_complete()
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self._cycles.clear()

    def _forget_complete(self) -> None:
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()

    def _poll(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._forget_complete()
        if transport.is_closing() or len(self._cycles) < 2:
            return
        if _peer_has_closed(transport):
            transport.abort()  # connection_lost follows
        else:
            self._timer = loop.call_later(POLL_SECONDS, self._poll, transport, loop)


def _peer_has_closed(transport: Any) -> bool:
    """Whether the peer has closed the connection, or its sending side. Unread bytes before the end do not hide it."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
