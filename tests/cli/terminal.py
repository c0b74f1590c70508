"""`baton` on a pseudo-terminal: what a person would see, and what is left when he closes the window."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from command_rig import BATON, ENVIRONMENT, family

PATIENCE_SECONDS = 120.0
"""A guard against hanging, nothing more."""


class Terminal:
    """One command with a terminal of its own. `seen` is every byte it wrote."""

    def __init__(self, *arguments: str | Path, program: Sequence[str] = BATON, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "100", "LINES": "40", **environment}
        environment.pop("NO_COLOR")
        self.process = subprocess.Popen(
            [*program, *map(str, arguments)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.seen = b""

    def read(self, seconds: float) -> bytes:
        """What comes within so long; empty where nothing does, or the terminal is closed."""
        ready, _, _ = select.select([self._ours], [], [], seconds)
        if not ready:
            return b""
        try:
            data = os.read(self._ours, 65536)
        except OSError as error:  # Linux says this where the other side has closed
            if error.errno != errno.EIO:
                raise
            data = b""
        self.seen += data
        return data

    def until(self, words: str, after: int = 0) -> int:
        """Where the words end in `seen`; from `after` on they are looked for."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (place := self.seen.find(words.encode(), after)) < 0:
            assert time.monotonic() < deadline, f"{words!r} did not come: {self.seen!r}"
            assert self.read(1.0) or self.process.poll() is None, f"{words!r} did not come: {self.seen!r}"
        return place + len(words.encode())

    def written_in(self, seconds: float) -> bytes:
        """Everything that comes while so much time passes."""
        start, deadline = len(self.seen), time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not self.read(left) and self.process.poll() is not None:
                break
        return self.seen[start:]

    def write(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def hang_up(self) -> None:
        """The window is closed: the kernel sends SIGHUP."""
        os.close(self._ours)
        self._ours = -1

    def close(self) -> None:
        if self._ours >= 0:
            self.hang_up()
        for pid in family(self.process.pid) if self.process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)


def _take_terminal() -> None:
    """The terminal on stdin becomes the one of this session."""
    import fcntl
    import termios

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests with nohup has it ignored, and children inherit that
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextlib.contextmanager
def on_terminal(*arguments: str | Path, program: Sequence[str] = BATON, **environment: str) -> Iterator[Terminal]:
    terminal = Terminal(*arguments, program=program, **environment)
    try:
        yield terminal
    finally:
        terminal.close()
