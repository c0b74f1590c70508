"""Logging of the processes: one line per record, on stderr, as text or as JSON.

    logger.info(...) --format--> line_writer.py: queue, bounded --thread--> stderr

A thread writes: a stopped terminal, or a pipe that is not read, delays neither the event loop nor the streams. Lines that find
the queue full are dropped, and the next written line reports their number.

No line contains text of a client. An exception is logged by type and place, without its message, which may quote a value.
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import time
import traceback
from typing import Any, TextIO

from baton.config import LogFormat, LogLevel
from baton.observe.line_writer import PARTS_MAX, LineWriter


class LineFormatter(logging.Formatter):
    """Formats a record as `2026-01-31T12:00:00.000Z info front: words key=value key=value`, or as JSON."""

    def __init__(self, process: str, *, as_json: bool) -> None:
        super().__init__()
        self._process = process
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        level, facts = record.levelname.lower(), dict(getattr(record, "facts", {}))
        if record.exc_info is not None and record.exc_info[1] is not None:
            facts["exception"], facts["at"] = type(record.exc_info[1]).__name__, traceback_text(record.exc_info[1])
        message = record.getMessage()
        if self._as_json:
            return json.dumps({"time": at, "level": level, "process": self._process, "message": message, **facts}, default=str)
        words = [f"{at} {level} {self._process}: {_one_line(message)}", *(f"{name}={_word(facts[name])}" for name in facts)]
        return " ".join(words)


def traceback_text(error: BaseException) -> str:
    """Frames of an exception, the innermost last: file, line and function of each, no values."""
    frames = traceback.extract_tb(error.__traceback__)
    own = " > ".join(f"{_module(frame.filename)}:{frame.lineno}:{frame.name}" for frame in frames[-12:])
    cause = error.__cause__ or error.__context__
    return f"{own} < {type(cause).__name__}" if cause is not None else own


def _module(file: str) -> str:
    """The last two parts of a path: the folders before them are private to this machine."""
    return "/".join(file.replace("\\", "/").split("/")[-2:])


def _one_line(text: str) -> str:
    return text if text.isprintable() else " ".join(text.split())


def _word(value: Any) -> str:
    """The value as it is, if it is one word; else quoted, so that no value looks like another field."""
    text = "-" if value is None else str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


class StderrHandler(logging.Handler):
    """Log handler that never waits: a thread writes the lines."""

    def __init__(self, stream: TextIO, lines_max: int = PARTS_MAX) -> None:
        super().__init__()
        self._stream = stream
        self.writer = LineWriter(lines_max)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        dropped = f"{self._dropped} lines of the log were dropped: stderr was not read"
        if self._dropped and self.writer.put(self._stream, f"{dropped}\n"):
            self._dropped = 0
        if self._dropped or not self.writer.put(self._stream, f"{line}\n"):
            self._dropped += 1

    def close(self) -> None:
        """Write waiting lines, within a second."""
        self.writer.close()
        super().close()


def configure(process: str, level: LogLevel, log_format: LogFormat, stream: TextIO | None = None) -> StderrHandler:
    """Configure the log. Called once by each process, before anything is logged. Loggers of libraries are included, from
    warnings on."""
    handler = StderrHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(LineFormatter(process, as_json=log_format == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    logging.getLogger("baton").setLevel(level.upper())
    atexit.register(handler.close)
    return handler
