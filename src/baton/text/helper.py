"""A process that does what must not be done here, because it could take too long, too much memory, or the process with it.

    thread --turn--> Helper --request--> helper_child.py, in a process with bounds of its own
           <-reply-- (killed at the deadline; replaced where it is gone)

Three things have one: chat templates, which are the model's programs; grammars, which are compiled by code that is not ours;
large JSON bodies, whose parsing would keep the interpreter lock. A helper answers one request at a time. Where its child is
gone (killed from outside, out of memory, a crash), or stands still (stopped, or a machine that is busy with others), another
is started and the request sent once more: time on the clock alone says nothing about a request.
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
"""For Python and libraries to be loaded, from a slow disk too. Usually some tenths of a second."""
TURN_SECONDS_MAX: Final = 30.0
"""How long a request waits for those before it."""
BUSY_SHARE: Final = 0.25
"""A child that had less of a processor than this share of its time did not take too long: it was not let."""
_KILL_SECONDS_MAX: Final = 10.0
# Nothing else of the environment is needed there, and some of it is secret.
_ENVIRONMENT: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")


class HelperTimeout(Exception):
    """The child worked, did not answer in time, and was killed."""


class HelperCrash(Exception):
    """The child ended on the request: by a fault that it caused, or twice."""


class _NotStarted(ConnectionError):
    """The child ended before it was ready."""


class _StoodStill(ConnectionError):
    """The child did not answer in time, and had no processor to do so."""


class Helper:
    """May be asked from any thread; a thread that asks waits."""

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
        """module        has the child's side, and calls helper_child.run
        work          what it does, for errors: "chat templates"
        start_with    what every child is told first
        environment   beside what every child gets"""
        self._module = module
        self._work = work
        self._memory_bytes_max = memory_bytes_max
        self.turn_seconds_max = turn_seconds_max
        self._start_with = start_with
        self._environment = environment or {}
        self._child: _Child | None = None
        # Whoever takes the entry has the child to itself, and puts the entry back.
        self._entry: Queue[None] = Queue(maxsize=1)
        self._entry.put_nowait(None)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The child is the caller's until the end of the block. Raises Unavailable."""
        try:
            self._entry.get(timeout=self.turn_seconds_max)
        except Empty:
            raise Unavailable(f"others are before you ({self._work}): try again later") from None
        # After a fork the child is the parent's: two that read from one socket would get each other's replies.
        if self._child is not None and self._child.owner != os.getpid():
            self._child = None
        try:
            yield
        finally:
            self._entry.put_nowait(None)

    def ask(self, request: Any, seconds: float, reply_bytes_max: int = FRAME_BYTES_MAX) -> Any:
        """Raises HelperTimeout, HelperCrash; Unavailable where no child can be started, or others take too long.

        And TypeError, ValueError or RecursionError for values that JSON does not have.
        """
        message = frame([seconds, request])
        with self.turn():
            return self.ask_in_turn(message, seconds, reply_bytes_max)

    def ask_in_turn(self, message: bytearray, seconds: float, reply_bytes_max: int) -> Any:
        """As `ask`, of who has the turn already."""
        for last in (False, True):
            answered = False
            try:
                reply = self._started().ask(message, seconds, reply_bytes_max)
                answered = True
                return reply
            except _NotStarted as error:
                if last:
                    raise Unavailable(f"the process for {self._work} does not start: {error}") from None
            except _StoodStill:
                if last:
                    raise Unavailable(f"the process for {self._work} stands still: try again later") from None
            except (ConnectionError, ValueError):  # it is gone, or writes what is no reply
                if last:
                    raise HelperCrash from None
            finally:
                if not answered:
                    self._end_child()  # its reply, if it still comes, must never meet another request
        raise AssertionError("the second attempt ends above")

    def start(self) -> None:
        """Start the child without waiting for it, so that the first request need not."""
        with self.turn():
            self._started()

    def close(self) -> None:
        """End the child, unless a request has it; that one ends when its reply finds nobody. The next request would start
        another."""
        with contextlib.suppress(Empty):
            self._entry.get_nowait()
            self._end_child()
            self._entry.put_nowait(None)

    @property
    def pid(self) -> int | None:
        """Of the child, if there is one."""
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
        "None once it said that it is ready."
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
            raise HelperTimeout if self._processor_seconds() - before >= BUSY_SHARE * seconds else _StoodStill from None
        except ConnectionError:
            if time.monotonic() >= deadline:  # its own timer was faster than this thread
                raise HelperTimeout from None
            self._raise_if_the_request_did_it()
            raise

    def _processor_seconds(self) -> float:
        """What it has used so far. Where the system does not say: as much as there is."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                user, system = file.read().rpartition(b")")[2].split()[11:13]
        except OSError:
            return time.monotonic()
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _raise_if_the_request_did_it(self) -> None:
        """The child is gone. Where a timer of its own ended it, or its stack was too small, another would end in the same way.
        Other ends may be somebody else's doing: memory that earlier requests took, the kernel, an operator."""
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
    """The child finds the modules that this process finds, and knows nothing else of its environment."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path)}
