"""Progress of long stages: downloads, compilation, loading.

stderr is a terminal    a bar per stage, removed at the end
a file or a pipe        a line per stage, and another one every few seconds: no carriage returns, no colours

A stage of unknown length has a moving bar, and lines with the seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

from baton.models.download import size_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 5.0
JOIN_SECONDS = 1.0


class Stages(Protocol):
    def announce(self, what: str, *, at_once: bool = True) -> None:
        """Begins a stage and ends the one before. Not `at_once`: a short stage gets no line in a log."""

    def advance(self, done: int, total: int) -> None:
        """Reports bytes of the current stage."""

    def close(self) -> None:
        """Ends the last stage. Idempotent."""


@contextmanager
def stages(say: Callable[[str], None], *, quiet: bool = False) -> Iterator[Stages]:
    """Stages on a terminal, or as lines. `say` prints a line, if there is no terminal."""
    shown = open_stages(say, quiet=quiet)
    try:
        yield shown
    finally:
        shown.close()


def open_stages(say: Callable[[str], None], *, quiet: bool = False) -> Stages:
    if quiet:
        return Silent()
    return Bars() if sys.stderr.isatty() else Lines(say)


class Silent:
    def announce(self, what: str, *, at_once: bool = True) -> None: ...

    def advance(self, done: int, total: int) -> None: ...

    def close(self) -> None: ...


class Bars:
    """Stages as bars on a terminal."""

    def __init__(self) -> None:
        self._drawn: Progress | None = None
        self._task: TaskID | None = None

    def announce(self, what: str, *, at_once: bool = True) -> None:
        drawn = self._begun()
        if self._task is not None:
            drawn.remove_task(self._task)
        self._task = drawn.add_task(what, total=None, size="")

    def advance(self, done: int, total: int) -> None:
        if self._drawn is not None and self._task is not None and total:
            size = f"{size_text(done)} of {size_text(total)}"
            self._drawn.update(self._task, completed=done, total=total, size=size)

    def close(self) -> None:
        if self._drawn is not None:
            self._drawn.stop()
        self._drawn = self._task = None

    def _begun(self) -> Progress:
        if self._drawn is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            words, size = TextColumn("{task.description}"), TextColumn("{task.fields[size]}")
            self._drawn = Progress(words, BarColumn(), size, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._drawn.start()
        return self._drawn


class Stage(NamedTuple):
    what: str
    since: float
    done: int = 0
    total: int = 0

    def text(self, now: float) -> str:
        seconds = f"{now - self.since:.0f} s"
        if not self.total:
            return f"{self.what}: {seconds}"
        share = f"{100 * self.done // self.total} %"
        return f"{self.what}: {size_text(self.done)} of {size_text(self.total)} ({share}) after {seconds}"


class Lines:
    """Stages as lines in a log. A thread repeats the current stage, so that a stall is visible. The thread reads a single value
    that is replaced as a whole, so no lock is needed."""

    def __init__(self, say: Callable[[str], None], seconds: float | None = None) -> None:
        self._say = say
        self._seconds = LINE_SECONDS if seconds is None else seconds
        self._stage = Stage("", 0.0)
        self._ended = Event()
        self._thread: Thread | None = None

    def announce(self, what: str, *, at_once: bool = True) -> None:
        self._stage = Stage(what, monotonic())
        if at_once:
            self._say(what)
        if self._thread is None:
            self._thread = Thread(target=self._repeat, name="progress-lines", daemon=True)
            self._thread.start()

    def advance(self, done: int, total: int) -> None:
        self._stage = self._stage._replace(done=done, total=total)

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _repeat(self) -> None:
        while not self._ended.wait(self._seconds):
            self._say(self._stage.text(monotonic()))
