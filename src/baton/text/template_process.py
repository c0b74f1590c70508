"""Owns the process in which chat templates run (template_child.py), and ends it where a template does not end.

A template comes with the model, so it is somebody else's program. Each request has a deadline; at the deadline the child is
killed, and the next request starts another. A child that is gone (killed from outside, out of memory, a crash) is replaced
and the request sent once more. One child serves all templates of this process, one request at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import time
from functools import cache
from queue import Empty, Queue
from typing import Final, cast

from baton.errors import Unavailable
from baton.text.template_wire import Reply, Request, frame, receive, send

MEMORY_BYTES_MAX: Final = 512 * 1024 * 1024
"""Address space of the child. 192 MiB are enough for the largest chat: 8 Mi characters of four bytes."""

START_SECONDS_MAX: Final = 60.0
"""For Python and jinja2 to be loaded, from a slow disk too. Usually 0.15 s."""

TURN_SECONDS_MAX: Final = 30.0
"""How long a request waits for those before it. As many wait as there are threads that render: four in a server."""

_KILL_SECONDS_MAX: Final = 10.0
# Nothing else of the environment is needed there, and some of it is secret.
_ENVIRONMENT: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")


class TemplateTimeout(Exception):
    """The child did not answer in time, and was killed."""


class TemplateCrash(Exception):
    """The child ended twice on the same request."""


class _NotStarted(ConnectionError):
    """The child ended before it was ready."""


class TemplateProcess:
    """May be asked from any thread; a thread that asks waits."""

    def __init__(self, memory_bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self._memory_bytes_max = memory_bytes_max
        # The one who takes the entry has the child to itself, and puts it back.
        self._turn: Queue[_Child | None] = Queue(maxsize=1)
        self._turn.put_nowait(None)

    def start(self) -> None:
        """Start the child without waiting for it, so that the first request need not."""
        child = self._take()
        try:
            child = child or _Child(self._memory_bytes_max)
        finally:
            self._turn.put_nowait(child)

    def ask(self, request: Request, reply_bytes_max: int) -> Reply:
        """Raises TemplateTimeout, TemplateCrash; Unavailable where no child can be started, or others take too long.

        And TypeError, ValueError or RecursionError for values that JSON does not have.
        """
        message = frame(request)
        child = self._take()
        try:
            for attempt in (1, 2):
                child = child or _Child(self._memory_bytes_max)
                try:
                    return child.ask(message, request["seconds_max"], reply_bytes_max)
                except _NotStarted as error:
                    if attempt == 2:
                        raise Unavailable(f"the process for chat templates does not start: {error}") from None
                except (ConnectionError, ValueError):  # it is gone, or writes what is no reply
                    if attempt == 2:
                        raise TemplateCrash from None
                child.close()
                child = None
            raise AssertionError("the second attempt ends above")
        except BaseException:
            if child is not None:
                child.close()  # its reply, if it still comes, must never meet another request
                child = None
            raise
        finally:
            self._turn.put_nowait(child)

    def close(self) -> None:
        """End the child, unless a request has it. The next request would start another."""
        with contextlib.suppress(Empty):
            child = self._turn.get_nowait()
            if child is not None:
                child.close()
            self._turn.put_nowait(None)

    def _take(self) -> _Child | None:
        try:
            child = self._turn.get(timeout=TURN_SECONDS_MAX)
        except Empty:
            raise Unavailable("other chats are being rendered: try again later") from None
        # After a fork the child is the parent's: two that read from one socket would get each other's prompts.
        return child if child is not None and child.owner == os.getpid() else None


class _Child:
    def __init__(self, memory_bytes_max: int) -> None:
        self.owner = os.getpid()
        self._ready_by: float | None = time.monotonic() + START_SECONDS_MAX
        "None once it said that it is ready."
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "baton.text.template_child", str(memory_bytes_max)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent
                env=_environment(),
            )
        except OSError as error:
            ours.close()
            raise Unavailable(f"the process for chat templates cannot be started: {error.strerror}") from None
        finally:
            theirs.close()
        self._socket = ours

    def ask(self, message: bytearray, seconds: float, reply_bytes_max: int) -> Reply:
        if self._ready_by is not None:
            self._wait_ready(self._ready_by)
        deadline = time.monotonic() + seconds
        try:
            send(self._socket, message, deadline)
            reply = receive(self._socket, reply_bytes_max, deadline)
        except TimeoutError:
            raise TemplateTimeout from None
        except ConnectionError:
            if time.monotonic() >= deadline:  # its own timer was faster than this thread
                raise TemplateTimeout from None
            raise
        if not isinstance(reply, list) or len(reply) != 2:
            raise ValueError("no reply")
        return cast(Reply, tuple(reply))

    def _wait_ready(self, deadline: float) -> None:
        try:
            receive(self._socket, 1024, deadline)
        except TimeoutError:
            raise _NotStarted(f"not ready within {START_SECONDS_MAX:g} s") from None
        except ConnectionError:
            self.close()
            raise _NotStarted(f"it ended with status {self._process.returncode}, and its error output says why") from None
        self._ready_by = None

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS_MAX)


def _environment() -> dict[str, str]:
    """The child finds the modules that this process finds, and knows nothing else of its environment."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path)}


@cache
def shared_process() -> TemplateProcess:
    """The one of this process."""
    process = TemplateProcess()
    atexit.register(process.close)
    return process
