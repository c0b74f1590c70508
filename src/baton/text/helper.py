"""A child process for work that could take too long, take too much memory, or crash.

    thread --turn--> Helper --request--> helper_child.py, in a process with its own limits
           <-reply-- (killed at the deadline; replaced when it is gone)

Used for chat templates, which are the model's programs; grammars, which foreign code compiles; and large JSON bodies, whose
parsing would hold the interpreter lock. A helper answers one request at a time. If its child is gone (killed, out of memory,
crashed) or starved (stopped, or a busy machine), another is started and the request sent once more: wall-clock time alone does
not show that a request is slow.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, Queue
from typing import Any, Final

from baton.errors import Unavailable
from baton.text.helper_wire import FRAME_BYTES_MAX, frame, receive, send

START_SECONDS_MAX: Final = 60.0
"""Seconds to load Python and libraries, also from a slow disk. Usually some tenths of a second."""
TURN_SECONDS_MAX: Final = 30.0
"""Seconds that a request waits for earlier ones."""
BUSY_SHARE: Final = 0.25
"""Share of its time below which a child's CPU counts as starved: the child was not slow."""
_KILL_SECONDS_MAX: Final = 10.0
# The child needs nothing else of the environment, and some of it is secret.
_ENVIRONMENT: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")


class HelperTimeout(Exception):
    """The child used its CPU time, did not answer in time, and was killed."""


class HelperCrash(Exception):
    """The child ended while it processed the request: by a fault that the request caused, or twice."""


class _NotStarted(ConnectionError):
    """The child ended before it was ready."""


class _Starved(ConnectionError):
    """The child did not answer in time, because it got no CPU."""


class Helper:
    """A helper child. Thread-safe; the calling thread blocks."""

    def __init__(
        self,
        module: str,
        work: str,
        *,
        memory_bytes_max: int,
        turn_seconds_max: float = TURN_SECONDS_MAX,
        start_with: Callable[[], Any] = lambda: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """module        the child's module, which calls helper_child.run
        work          the child's work, for errors: "chat templates"
        start_with    returns the first message to every child
        environment   additional variables"""
        self._module = module
        self._work = work
        self._memory_bytes_max = memory_bytes_max
        self.turn_seconds_max = turn_seconds_max
        self._start_with = start_with
        self._environment = environment or {}
        self._child: _Child | None = None
        # A queue as a lock: the thread that holds the entry owns the child, and puts the entry back.
        self._entry: Queue[None] = Queue(maxsize=1)
        self._entry.put_nowait(None)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Own the child until the end of the block. Raises Unavailable."""
        try:
            self._entry.get(timeout=self.turn_seconds_max)
        except Empty:
            raise Unavailable(f"others are before you ({self._work}): try again later") from None
        # After a fork the child belongs to the parent: two readers of one socket would get each other's replies.
        if self._child is not None and self._child.owner != os.getpid():
            self._child = None
        try:
            yield
        finally:
            self._entry.put_nowait(None)

    def ask(self, request: Any, seconds: float, reply_bytes_max: int = FRAME_BYTES_MAX) -> Any:
        """Send a request and return the reply. Raises HelperTimeout, HelperCrash; Unavailable if no child can be started, or
        earlier requests take too long; TypeError, ValueError or RecursionError for values outside of JSON."""
        message = frame([seconds, request])
        with self.turn():
            return self.ask_in_turn(message, seconds, reply_bytes_max)

    def ask_in_turn(self, message: bytearray, seconds: float, reply_bytes_max: int) -> Any:
        """Send a request as `ask` does, for a caller that holds the turn."""
        for last in (False, True):
            answered = False
            try:
                reply = self._started().ask(message, seconds, reply_bytes_max)
                answered = True
                return reply
            except _NotStarted as error:
                if last:
                    raise Unavailable(f"the process for {self._work} does not start: {error}") from None
            except _Starved:
                if last:
                    raise Unavailable(f"the process for {self._work} does not answer: try again later") from None
            except (ConnectionError, ValueError):  # the child is gone, or sends no valid reply
                if last:
                    raise HelperCrash from None
            finally:
                if not answered:
                    self._end_child()  # a late reply must never meet another request
        raise AssertionError("the second attempt ends above")

    def start(self) -> None:
        """Starts the child without waiting for it, so that the first request is faster."""
        with self.turn():
            self._started()

    def close(self) -> None:
        """Ends the child, unless a request uses it; then it ends when its reply finds no reader. A later request starts
        another."""
        with contextlib.suppress(Empty):
            self._entry.get_nowait()
            self._end_child()
            self._entry.put_nowait(None)

    @property
    def pid(self) -> int | None:
        """Process id of the child, if there is one."""
        child = self._child
        return None if child is None else child.pid

    def _started(self) -> _Child:
        if self._child is None:
            try:
                self._child = _Child(self._module, self._memory_bytes_max, self._environment, self._start_with)
            except OSError as error:
                raise Unavailable(f"the process for {self._work} cannot be started: {error.strerror}") from None
        return self._child

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class _Child:
    def __init__(
        self, module: str, memory_bytes_max: int, environment: Mapping[str, str], start_with: Callable[[], Any]
    ) -> None:
        self.owner = os.getpid()
        self._start_with: Callable[[], Any] | None = start_with
        "Returns the first message to the child. None once the child is ready."
        self._ready_by = time.monotonic() + START_SECONDS_MAX
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(memory_bytes_max)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent
                env={**_kept_environment(), **environment},
            )
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid

    def ask(self, message: bytearray, seconds: float, reply_bytes_max: int) -> Any:
        if self._start_with is not None:
            self._wait_ready(self._start_with())
        deadline, before = time.monotonic() + seconds, self._processor_seconds()
        try:
            send(self._socket, message, deadline)
            return receive(self._socket, reply_bytes_max, deadline)
        except TimeoutError:
            raise HelperTimeout if self._processor_seconds() - before >= BUSY_SHARE * seconds else _Starved from None
        except ConnectionError:
            if time.monotonic() >= deadline:  # the child's own timer ended it before this thread did
                raise HelperTimeout from None
            self._raise_if_caused_by_request()
            raise

    def _processor_seconds(self) -> float:
        """CPU time of the child so far; wall-clock time where the system does not report it."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                user, system = file.read().rpartition(b")")[2].split()[11:13]
        except OSError:
            return time.monotonic()
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _raise_if_caused_by_request(self) -> None:
        """Raises if a retry would end in the same way, after the child is gone: the child's own timer, or a stack
        overflow. Other ends may have other causes: memory of earlier requests, the kernel, an operator."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS_MAX)
        if self._process.returncode in (-signal.SIGALRM, -signal.SIGPROF):
            raise HelperTimeout from None
        if self._process.returncode == -signal.SIGSEGV:
            raise HelperCrash from None

    def _wait_ready(self, first: Any) -> None:
        try:
            send(self._socket, frame(first), self._ready_by)
            receive(self._socket, 1024, self._ready_by)
        except TimeoutError:
            raise _NotStarted(f"not ready within {START_SECONDS_MAX:g} s") from None
        except ConnectionError:
            self.close()
            raise _NotStarted(f"it ended with status {self._process.returncode}, and its error output says why") from None
        self._start_with = None

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS_MAX)


def _kept_environment() -> dict[str, str]:
    """The child's environment: it finds the same modules, and gets no other variables."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path)}
