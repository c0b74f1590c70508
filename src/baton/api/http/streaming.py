"""Streams of server-sent events; they end if the client leaves or does not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.types import Message, Receive, Scope, Send

from baton.api.dialect import Dialect
from baton.api.errors import ApiError, as_api_error
from baton.api.http.budget import Lease

T = TypeVar("T")
logger = logging.getLogger("baton.api")

_UNCOUNTED_BYTES = 16 * 1024
"Most waiting bytes of a client that keeps up."


class ClientGone(Exception):
    """The client closed the connection or does not read."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class EndOfTurn:
    """Runs callbacks once per wake-up of the loop, after all its events are processed."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def run_at_end(self, what: Callable[[], None]) -> None:
        """Run the callback after all events of this turn of the loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._run)
        self._waiting.append(what)

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for what in waiting:
            try:
                what()
            except Exception as error:  # an error of one stream: the others are not affected
                logger.error("a stream could not be written: %s", type(error).__name__, exc_info=error)


class DirectBody(Protocol):
    """Direct access to the socket, past ASGI, while an answer is being sent."""

    @property
    def ready(self) -> bool:
        """Whether the answer has begun, has not ended, and the client keeps up."""
        ...

    def write(self, data: bytes) -> None: ...


class SendBuffer:
    """Events that the client has not read yet. Larger buffers count in the process's budget of bytes in flight."""

    def __init__(self, bytes_max: int, lease: Lease | None = None) -> None:
        self._bytes_max = bytes_max
        self._lease = lease
        self._events: list[bytes] = []
        self._bytes = 0
        self.news = asyncio.Event()
        self.overflowed = asyncio.Event()
        self.on_first: Callable[[], None] = self.news.set
        "Called when the first event enters an empty buffer."

    def put(self, event: bytes) -> None:
        if not self._events:
            self.on_first()
        self._events.append(event)
        self._bytes += len(event)
        if self._bytes > _UNCOUNTED_BYTES:
            self._count(len(event))

    def _count(self, more: int) -> None:
        try:
            if self._lease is not None:
                self._lease.take(more)
        except ApiError:
            self._bytes = self._bytes_max + 1
        if self._bytes > self._bytes_max:
            self.overflowed.set()
            raise ClientGone("slow")

    @property
    def empty(self) -> bool:
        return not self._events

    def take(self) -> bytes:
        """All waiting events, for one write."""
        data = b"".join(self._events)
        self._events.clear()
        self._bytes = 0
        if self._lease is not None:
            self._lease.close()
        return data


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client leaves first, `work` is cancelled and ClientGone raised."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(until_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("disconnected")
        return working.result()
    finally:
        await _cancel(working, leaving)


class EventStream:
    """One streamed answer."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        headers: dict[str, str],
        keep_alive_seconds: float,
        write_seconds: float,
        turn: EndOfTurn,
        dialect: Dialect,
        error_event: Callable[[ApiError], bytes],
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._keep_alive_seconds = keep_alive_seconds
        self._write_seconds = write_seconds
        self._headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self._direct: DirectBody | None = scope.get("state", {}).get("direct_body")
        self._turn = turn
        self._dialect = dialect
        self._error_event = error_event
        self._now = asyncio.get_running_loop().time
        self._sent_at = self._now()
        self._delivering = False
        self.started = False
        "Whether status and headers are being sent: later errors become an event."
        self.error: BaseException | None = None
        "The error that was sent as an event."

    async def run(self, buffer: SendBuffer, produce: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Sends what `produce` puts into the buffer, until it returns. Raises its error if nothing was sent before."""
        if self._direct is not None:
            flush = partial(self._flush, buffer)
            buffer.on_first = partial(self._turn.run_at_end, flush)
        producing = asyncio.create_task(produce())
        producing.add_done_callback(lambda _: buffer.news.set())
        writing = asyncio.create_task(self._write(buffer, producing))
        leaving = asyncio.create_task(until_disconnect(self._receive))
        overflowing = asyncio.create_task(_wait(buffer.overflowed))
        try:
            await asyncio.wait({writing, leaving, overflowing}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            else:
                raise ClientGone("disconnected" if leaving.done() else "slow")
        except ClientGone as gone:
            if gone.how == "slow":
                drop_connection(self._scope)
            raise
        finally:
            await _cancel(producing, writing, leaving, overflowing)

    async def _write(self, buffer: SendBuffer, producing: asyncio.Task[None]) -> None:
        while True:
            idle = await self._idle(buffer)
            finished = producing.done()
            if finished and (error := producing.exception()) is not None:
                if isinstance(error, ClientGone) or (not self.started and buffer.empty):
                    raise error
                self.error = error
                buffer.put(self._error_event(_error_for_client(error)))  # without [DONE]: the answer is incomplete
            if finished:
                await self._deliver(buffer.take(), last=True)
                return
            if idle or not buffer.empty:
                await self._deliver(buffer.take() or self._dialect.keep_alive)

    def _flush(self, buffer: SendBuffer) -> None:
        """Writes events directly to the socket. If that is not possible, or the writer is sending, the writer sends them."""
        if buffer.empty:
            return  # the writer has sent the events already
        data = b""
        try:
            if not self._delivering and self._direct is not None and self._direct.ready:
                data = buffer.take()
                self._direct.write(data)
                self._sent_at = self._now()
                return
        except Exception as error:  # an unknown version of uvicorn: ASGI still works
            logger.warning("streams take the long way: %s", type(error).__name__, exc_info=error)
            self._direct = None
            if data:
                buffer.put(data)
        buffer.news.set()

    async def _idle(self, buffer: SendBuffer) -> bool:
        """Waits for events; True if nothing was sent for keep_alive_seconds."""
        while True:
            due = self._sent_at + self._keep_alive_seconds
            try:
                async with asyncio.timeout_at(due):
                    await buffer.news.wait()
            except TimeoutError:
                if self._sent_at + self._keep_alive_seconds <= due:
                    return True
                continue  # events were sent directly in the meantime
            buffer.news.clear()
            return False

    async def _deliver(self, data: bytes, *, last: bool = False) -> None:
        self._delivering = True
        try:
            async with asyncio.timeout(self._write_seconds):
                if not self.started:
                    self.started = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                message: Message = {"type": "http.response.body", "body": data, "more_body": not last}
                await self._send(message)
        except TimeoutError:
            raise ClientGone("slow") from None
        finally:
            self._delivering = False
            self._sent_at = self._now()


def drop_connection(scope: Scope) -> None:
    """Closes the connection and discards the socket's buffer (server.py provides this)."""
    abort = scope.get("state", {}).get("abort_connection")
    if abort is not None:
        abort()


def _error_for_client(error: BaseException) -> ApiError:
    return as_api_error(error) if isinstance(error, Exception) else ApiError(500, "the request was cancelled")


async def _wait(happened: asyncio.Event) -> None:
    await happened.wait()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancels the tasks and waits for their `finally` blocks."""
    for task in tasks:
        task.cancel()
    waiting: Awaitable[Any] = asyncio.gather(*tasks, return_exceptions=True)
    await waiting
