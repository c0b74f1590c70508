"""Limits of incoming connections: open ones, accepts per turn of the loop, and TLS handshakes.

                    too many, far       a few over the bound       within it
    accept ------>  closed at once      answered: an error         served
        \\                              (health is served)
         TLS only: the handshake. Over the limit the oldest is closed: an honest client finishes quickly.

A connection counts from here to the end of its socket, so one that never finishes its handshake counts too.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Any, Final

from baton.api.errors import ApiError
from baton.api.limits import Limits

RESERVE: Final = 64
"Connections over the limit that still get an error as answer."
ACCEPTS_PER_TURN: Final = 4
"""Accepted connections per turn. asyncio would accept all waiting ones, hundreds, in one turn of the loop; meanwhile no stream
gets a token. 200 connections that sent something wrong at once took 41 ms of CPU in one turn, with this limit 6
(docs/internals/notes/gaps.md)."""


OUT_OF_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connections:
    """Connections of all listeners of a server."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._of_address: dict[str, int] = {}
        self._refused: dict[Any, ApiError] = {}
        self._shaking: dict[Any, socket.socket] = {}
        self.total = 0

    def admit(self, peer: Any) -> bool:
        """Counts the connection. False: it is over the reserve too, gets no answer, and is not counted."""
        if self._full(peer, RESERVE) is not None:
            return False
        refusal = self._full(peer, 0)
        if refusal is not None:
            self._refused[peer] = refusal
        address = _address(peer)
        self.total += 1
        self._of_address[address] = self._of_address.get(address, 0) + 1
        return True

    def begin_handshake(self, connection: socket.socket, peer: Any) -> None:
        self._shaking[peer] = connection
        while len(self._shaking) > self._limits.handshakes:
            oldest = self._shaking.pop(next(iter(self._shaking)))
            with contextlib.suppress(OSError):  # the client may have disconnected
                oldest.shutdown(socket.SHUT_RDWR)  # asyncio reads EOF, and closes

    def begin_requests(self, peer: Any) -> ApiError | None:
        """Ends the handshake, if any. Returns the error for its requests where there are too many connections."""
        self._shaking.pop(peer, None)
        return self._refused.get(peer)

    def close(self, peer: Any) -> None:
        address = _address(peer)
        self._shaking.pop(peer, None)
        self._refused.pop(peer, None)
        self.total -= 1
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]

    @property
    def shaking(self) -> int:
        return len(self._shaking)

    def _full(self, peer: Any, more: int) -> ApiError | None:
        """The error for one more connection if the limits plus `more` are reached, else None."""
        limits = self._limits
        if self._of_address.get(_address(peer), 0) >= limits.connections_per_address + more:
            message = f"{limits.connections_per_address} connections from this address are open, which is the limit"
            return ApiError(429, message, code="too_many_connections")
        if self.total >= limits.connections + more:
            message = f"{limits.connections} connections are open, which is the limit"
            return ApiError(503, message, code="too_many_connections")
        return None


class ConnectionLimit(socket.socket):
    """A listening socket for asyncio's server. Takes over the file descriptor of `listening`."""

    def __init__(self, listening: socket.socket, connections: Connections, *, tls: bool) -> None:
        super().__init__(fileno=listening.detach())
        self._connections = connections
        self._tls = tls
        self._accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection and counts it. Raises the error by which asyncio ends the turn, or skips the connection."""
        if self._accepted == ACCEPTS_PER_TURN:
            self._accepted = 0
            raise BlockingIOError("the rest waits for the next turn of the loop")
        try:
            plain, peer = super().accept()
        except OSError as error:
            # No connection waits, or no file can be opened. In the second case asyncio logs an error and retries in a second,
            # but also continues this turn: without this end of the turn it would fail and log thousands of times.
            self._accepted = ACCEPTS_PER_TURN if error.errno in OUT_OF_FILES else 0
            raise
        self._accepted += 1
        if not self._connections.admit(peer):
            plain.close()
            raise ConnectionAbortedError("too many connections")  # asyncio ends its turn, and accepts again later
        connection = _Counted(plain, self._connections, peer)
        if self._tls:
            self._connections.begin_handshake(connection, peer)
        return connection, peer


class _Counted(socket.socket):
    """An accepted socket, counted until it is closed."""

    def __init__(self, accepted: socket.socket, connections: Connections, peer: Any) -> None:
        super().__init__(fileno=accepted.detach())
        self._counted_in: Connections | None = connections
        self._peer = peer

    def close(self) -> None:
        super().close()
        connections, self._counted_in = self._counted_in, None
        if connections is not None:
            connections.close(self._peer)


def _address(peer: Any) -> str:
    """The peer's IP address; empty for a unix socket."""
    return str(peer[0]) if isinstance(peer, tuple) else ""
