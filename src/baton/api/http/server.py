"""uvicorn with limits: uvicorn itself waits for ever for headers, and accepts any amount of them.

Conflicting lengths and the like are refused by its parser (llhttp). Without a timer and a cap a client that sends a byte per
minute would hold a connection.

Connections are counted (connection_limit.py), and requests start a few at a time (layers.py). A connection's open requests end
with it (pipelining.py). Nothing is read from the environment, where uvicorn looks for settings too.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.api.errors import ApiError
from baton.api.http.connection_limit import ConnectionLimit, Connections
from baton.api.http.layers import Paced, RootPath
from baton.api.http.pipelining import PipelinedRequests
from baton.api.http.shutdown import EndedByShutdown
from baton.api.limits import Limits

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_RECEIVE_BYTES = 64 * 1024
"Maximum bytes that one connection delivers per turn of the loop, so that many senders do not delay the streams."
_SEND_BYTES = 128 * 1024
"Size of the kernel buffer for a client that does not read. The default would be megabytes, outside of our budget."
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class UvicornBody:
    """Writes chunks of a started body to uvicorn's transport directly (streaming.py has the reason).

    An event costs the front 67 us in place of 120 (docs/internals/notes/host-speed.md). It uses undocumented attributes:
    pyproject.toml bounds the version, and if one is missing the stream falls back to ASGI (streaming.py: _flush).
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        cycle = self._cycle
        begun = cycle.chunked_encoding is True and not cycle.response_complete
        return begun and not cycle.disconnected and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class StrictProtocol(HttpToolsProtocol):
    limits: Limits
    open_connections: Connections
    _header_bytes = 0
    _header_timer: asyncio.TimerHandle | None = None
    _refusal: ApiError | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._open = PipelinedRequests()
        self._refusal = self.open_connections.begin_requests(transport.get_extra_info("peername"))
        _watch_peer(transport, self.limits)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._open.disconnect()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        super().on_message_begin()
        self.scope["state"]["abort_connection"] = self.transport.abort
        if self._refusal is not None:
            self.scope["state"]["connection_refusal"] = self._refusal

    def data_received(self, data: bytes) -> None:
        # The timer starts with the connection, and on a kept-alive one with the first byte of the next request.
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._arm()
        super().data_received(data)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm()
        if self.transport.is_closing():
            return
        super().on_headers_complete()
        if self.cycle is not None:
            self._open.add(self.cycle, self.transport, self.loop)
            self.scope["state"]["direct_body"] = UvicornBody(self.cycle)
            if self.scope["http_version"] == "1.0":
                _send_without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.cycle is not None:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade (WebSocket, HTTP/2) is ignored, as HTTP has it. uvicorn would tell the operator to install a package."""

    def _count(self, more: int) -> None:
        self._header_bytes += more
        if self._header_bytes > self.limits.header_bytes:
            self._refuse(_TOO_LARGE)

    def _refuse(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()

    def _arm(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.header_seconds, self._refuse, _TOO_SLOW)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Sends an answer to HTTP/1.0, which has no chunked encoding, though uvicorn uses it for every client: chunk lengths would
    appear in the answer. Without chunks a body of unknown length ends with the connection, which uvicorn closes."""
    send, by_length = cycle.send, True

    async def send_plain(message: Any) -> None:
        nonlocal by_length
        if message["type"] == "http.response.start":
            by_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if by_length else False
        elif not by_length:
            cycle.expected_content_length = len(message.get("body", b""))  # length of this part: uvicorn counts it down to 0
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


def protocol_class(limits: Limits, connections: Connections) -> type[HttpToolsProtocol]:
    """A protocol class with its limits as attributes: uvicorn creates the objects and passes no arguments of ours."""
    return type("Protocol", (StrictProtocol,), {"limits": limits, "open_connections": connections})


def _watch_peer(transport: Any, limits: Limits) -> None:
    """Sets socket options. TCP_USER_TIMEOUT closes connections to a vanished peer: its bytes are not acknowledged."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.write_seconds * 1000))


class Server(uvicorn.Server):
    """A server that leaves signals to its caller, which ends open requests first."""

    def __init__(self, config: uvicorn.Config, connections: Connections, handshake_seconds: float) -> None:
        super().__init__(config)
        self.open_connections = connections
        self._handshake_seconds = handshake_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        tls = self.config.ssl is not None
        listening = sockets or [self.config.bind_socket()]
        limited_sockets: list[socket.socket] = [ConnectionLimit(sock, self.open_connections, tls=tls) for sock in listening]
        loop = asyncio.get_running_loop()
        if not tls:
            return await super().startup(sockets=limited_sockets)
        # uvicorn has no setting for the handshake timeout, and asyncio's default is a minute.
        create_server = loop.create_server
        loop.create_server = partial(create_server, ssl_handshake_timeout=self._handshake_seconds)  # type: ignore[method-assign]
        try:
            await super().startup(sockets=limited_sockets)
        finally:
            loop.create_server = create_server  # type: ignore[method-assign]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(
    app: ASGIApp,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    tls: ssl.SSLContext | None = None,
    root_path: str = "",
    **settings: Any,
) -> Server:
    """A server, which listens on loopback by default. `settings` go to uvicorn.Config (log_level, ...). `limits`: only for an
    app that is not from make_app."""
    if limits is None:
        assert isinstance(app, Starlette)
        limits = app.state.front.limits
    connections = Connections(limits)
    config = uvicorn.Config(
        EndedByShutdown(Paced(RootPath(app, root_path) if root_path else app)),
        **{
            "host": host,
            "port": port,
            "http": protocol_class(limits, connections),
            "ws": "none",
            "loop": "asyncio",  # uvloop made no measurable difference (docs/internals/notes/host-speed.md)
            "access_log": False,
            "server_header": False,
            "date_header": True,
            "log_config": None,  # observe/logs.py configures logging
            "proxy_headers": False,  # addresses and schemes are the socket's; these three also keep uvicorn off the environment
            "forwarded_allow_ips": "",
            "workers": 1,
            "timeout_keep_alive": 30,
            "backlog": 2048,
            **settings,
        },
    )
    if tls is not None:
        config.load()  # otherwise uvicorn would create its own context, with its own ciphers
        config.ssl = tls
    return Server(config, connections, limits.header_seconds)
