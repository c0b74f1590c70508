"""Looks up the addresses of a host within a deadline. `getaddrinfo` itself has none: a name server that does not answer keeps
it waiting for many seconds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from baton.kvcache.storage.backend import Deadline

Found = Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]
"""Results of `getaddrinfo`."""

_running: dict[tuple[str, int], Future[Found]] = {}
"""Lookups in progress. Later calls wait for them: a silent name server holds one thread per name."""


def resolve(host: str, port: int, deadline: Deadline) -> Found:
    """Addresses of a host. Raises OSError; TimeoutError after the deadline, and the lookup continues in its thread."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # the host is a name
    except UnicodeError as error:  # the name is invalid: too long, say
        raise OSError(str(error)) from None
    fresh: Future[Found] = Future()
    future = _running.setdefault((host, port), fresh)
    if future is fresh:
        threading.Thread(target=_look_up, args=(host, port, fresh), daemon=True, name="name lookup").start()
    return future.result(deadline.left())


def _look_up(host: str, port: int, future: Future[Found]) -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except BaseException as error:
        del _running[host, port]
        future.set_exception(OSError(str(error)) if isinstance(error, UnicodeError) else error)
    else:
        del _running[host, port]
        future.set_result(found)
