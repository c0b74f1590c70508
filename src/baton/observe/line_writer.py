"""Writes text to a terminal, a pipe or a file: a thread writes, so `put` never waits and never fails.

    put(stream, text) --> queue, bounded --thread--> stream

If the stream is not read (a terminal stopped by Ctrl-S, a pipe) the queue fills, and further text is refused. If the stream is
broken (the window was closed, the program behind the pipe has ended, the disk is full) its text is lost. A serving process
continues in both cases.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import TextIO

PARTS_MAX = 10_000
"""Maximum of lines that wait to be written."""
FLUSH_SECONDS = 1.0
"""Seconds that the end of the process waits for the lines."""


class LineWriter:
    def __init__(self, parts_max: int = PARTS_MAX) -> None:
        self._parts: queue.Queue[tuple[TextIO, str] | None] = queue.Queue(parts_max)
        self._thread = threading.Thread(target=self._run, name="baton-lines", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._parts.qsize()

    def put(self, stream: TextIO | None, text: str) -> bool:
        """Queue text for the stream. False: the queue is full, and the text is refused. Without a stream (closed before we
        began) everything is accepted."""
        try:
            if stream is not None:
                self._parts.put_nowait((stream, text))
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Write waiting text, within a second."""
        with contextlib.suppress(queue.Full):
            self._parts.put_nowait(None)
            self._thread.join(FLUSH_SECONDS)

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # log output is not worth the server's life
                write_all(*part)


def write_all(stream: TextIO, text: str) -> None:
    """Write to the descriptor itself. A stream's buffer would keep unwritten text, and its lock meanwhile: the end of the
    process would try again, or fail for the lock."""
    try:
        descriptor = stream.fileno()
    except OSError:  # the stream has no descriptor, as in a test
        stream.write(text)
        stream.flush()
        return
    data = memoryview(text.encode(stream.encoding, "backslashreplace"))
    while data:
        data = data[os.write(descriptor, data) :]
