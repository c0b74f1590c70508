"""Lines of the log: what is in them, what is not, and that nobody waits for whoever reads them."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re

import pytest

from baton.observe.logs import LineFormatter, StderrHandler, configure

SECRET = "what the client wrote"


def record(message: str = "request", *, facts=None, error: Exception | None = None, level: int = logging.INFO):
    exc_info = (type(error), error, error.__traceback__) if error is not None else None
    made = logging.LogRecord("baton.api", level, __file__, 1, message, (), exc_info)
    made.created, made.msecs = 0.0, 5.0
    if facts is not None:
        made.facts = facts
    return made


def raised() -> Exception:
    def inner(text: str) -> None:
        raise ValueError(f"cannot read {text}")

    try:
        try:
            inner(SECRET)
        except ValueError as error:
            raise RuntimeError(SECRET) from error
    except RuntimeError as error:
        return error


def test_text_line():
    line = LineFormatter("front", as_json=False).format(record(facts={"id": "a b=c", "status": 200, "cached_tokens": None}))
    assert line == '1970-01-01T00:00:00.005Z info front: request id="a b=c" status=200 cached_tokens=-'
    for odd in ("status=500", 'a"b', "a b", "", "a\nb"):  # none of them looks like a field, or like another line
        line = LineFormatter("front", as_json=False).format(record(facts={"id": odd}))
        assert line.endswith(f" id={json.dumps(odd)}")


def test_json_line():
    line = LineFormatter("front", as_json=True).format(record(facts={"id": "a", "cached_tokens": None}))
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.005Z", "level": "info", "process": "front", "message": "request", "id": "a",
        "cached_tokens": None,
    }  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True])
def test_of_an_exception_only_type_and_places(as_json):
    line = LineFormatter("front", as_json=as_json).format(record("it failed", error=raised()))
    assert "RuntimeError" in line
    assert "observe/test_logs.py" in line
    assert "ValueError" in line
    assert SECRET not in line
    assert "\n" not in line


def test_no_line_break_gets_into_a_line():
    line = LineFormatter("front", as_json=False).format(record("one\ntwo", facts={"id": "x\nfake status=200"}))
    assert line == '1970-01-01T00:00:00.005Z info front: one two id="x\\nfake status=200"'


def test_a_reader_that_does_not_read_holds_up_nobody():
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    handler = StderrHandler(stream, lines_max=100)
    handler.setFormatter(LineFormatter("front", as_json=False))
    for _ in range(5000):
        handler.emit(record("x" * 1000))  # 5 MB into a pipe of 64 KiB
    drained = b""
    while handler.writer.waiting:
        drained += os.read(reading, 65536)
    handler.emit(record("the next one"))
    while b"the next one" not in drained:
        drained += os.read(reading, 65536)
    handler.close()
    stream.close()
    os.close(reading)
    told = [int(number) for number in re.findall(rb"(\d+) lines of the log were dropped", drained)]
    assert drained.count(b"x" * 1000) + sum(told) == 5000  # told in one line or in several: the writer ran meanwhile, or not
    assert sum(told) > 4000


def test_a_reader_that_has_left_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    handler = StderrHandler(stream)
    for _ in range(3):
        handler.emit(record("x" * 70_000))
    handler.close()
    assert not handler.writer.waiting
    with contextlib.suppress(BrokenPipeError):
        stream.close()


@pytest.fixture
def root():
    logger, ours = logging.getLogger(), logging.getLogger("baton")
    before = logger.handlers[:], logger.level, ours.level
    yield logger
    logger.handlers[:] = before[0]
    logger.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.mark.parametrize(
    ("level", "seen"), [("debug", "dbg inf wrn err"), ("info", "inf wrn err"), ("warning", "wrn err"), ("error", "err")]
)
def test_levels(root, level, seen):
    stream = io.StringIO()
    handler = configure("front", level, "text", stream)
    ours, theirs = logging.getLogger("baton.api"), logging.getLogger("somebody.else")
    ours.debug("dbg"), ours.info("inf"), ours.warning("wrn"), ours.error("err")
    theirs.info("theirs-info"), theirs.error("theirs-error")
    handler.close()
    words = [line.split(": ", 1)[1] for line in stream.getvalue().splitlines()]
    assert words == [*seen.split(), "theirs-error"]
