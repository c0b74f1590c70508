"""Parses large bodies in a process of its own (json_child.py), which is started by the first of them.

One body at a time; who comes meanwhile waits on its thread. A child that does not answer in time is killed, and one that is
gone is replaced by the next body's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from queue import Empty, Queue
from typing import Any, Final, cast

import msgspec

from baton.api.errors import ApiError
from baton.api.http.json_body import parse_object
from baton.api.http.json_child import LENGTH, receive
from baton.api.limits import Limits

INLINE_BYTES: Final = 128 * 1024
"""Smaller bodies are parsed by whoever has them: it takes some milliseconds at most."""

_END_SECONDS: Final = 5.0


class JsonProcess:
    """May be asked from any thread."""

    def __init__(self, limits: Limits, context_tokens: int) -> None:
        self._limits = limits
        self._context_tokens = context_tokens
        self._turn: Queue[_Child | None] = Queue(maxsize=1)
        self._turn.put_nowait(None)

    def parse(self, body: bytes) -> dict[str, Any]:
        """As `parse_object`, with the same errors; and 503 where the child cannot be had."""
        if len(body) <= INLINE_BYTES:
            return parse_object(body, self._limits)
        child = self._take()
        try:
            child = child or _Child(self._limits.prepare_seconds)
            value, error = child.ask(msgspec.msgpack.encode([asdict(self._limits), self._context_tokens, body]))
        except (OSError, ValueError, msgspec.DecodeError):
            if child is not None:
                child.close()
                child = None
            raise ApiError(503, "a large body could not be parsed; try again later", code="prepare_failed") from None
        finally:
            self._turn.put_nowait(child)
        if error is not None:
            status, message, param, code = error
            raise ApiError(status, message, param=param, code=code)
        return cast(dict[str, Any], value)

    def close(self) -> None:
        """Ends the child, unless a body is in it; that one ends when its reply finds nobody."""
        with contextlib.suppress(Empty):
            child = self._turn.get_nowait()
            if child is not None:
                child.close()
            self._turn.put_nowait(None)

    def _take(self) -> _Child | None:
        try:
            return self._turn.get(timeout=self._limits.prepare_seconds)
        except Empty:
            raise ApiError(503, "too many large requests are being prepared", code="prepare_timeout") from None


class _Child:
    def __init__(self, seconds: float) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(seconds)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "baton.api.http.json_child"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the parent
            )

    def ask(self, request: bytes) -> tuple[Any, Any]:
        self._socket.sendall(LENGTH.pack(len(request)))
        self._socket.sendall(request)
        reply = receive(self._socket)
        if reply is None:
            raise ConnectionError("the child is gone")
        value, error = msgspec.msgpack.decode(reply)
        return value, error

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
