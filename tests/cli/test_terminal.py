"""What people see on a terminal: bars that go away, nothing that is erased, and nobody left when the window is closed."""

from __future__ import annotations

import os
import signal
import time
from itertools import product
from pathlib import Path

import pytest
from command_rig import family, gone
from terminal import PATIENCE_SECONDS, on_terminal

HIDE_CURSOR, SHOW_CURSOR, ERASE_LINE, UP = b"\x1b[?25l", b"\x1b[?25h", b"\x1b[2K", b"\x1b[1A"
IDLE_SECONDS = 1.5
"""A bar is redrawn ten times a second."""
SMALL = ("--kv-memory-gib", "0.05", "--threads", "1")


def test_the_loading_bar_goes_away_and_an_idle_server_writes_nothing(tiny_model):
    with on_terminal("serve", tiny_model, "--port", "0", *SMALL) as terminal:
        ready = terminal.until("Ctrl-C ends it.")
        terminal.written_in(0.3)  # the end of the line
        assert terminal.seen[:ready].count(HIDE_CURSOR) == terminal.seen[:ready].count(SHOW_CURSOR)
        assert terminal.written_in(IDLE_SECONDS) == b""
        terminal.write("\x03")
        terminal.until("baton serve: stopped")
        tail = terminal.seen[ready:]
        assert not [code for code in (HIDE_CURSOR, ERASE_LINE, UP) if code in tail]
        assert terminal.process.wait(60) == 0


def test_a_failed_start_gives_the_cursor_back_and_the_error_is_the_last_line(tiny_model):
    with on_terminal("serve", tiny_model, "--port", "0", "--kv-memory-gib", "0.000001") as terminal:
        said = terminal.until("baton serve: ")
        terminal.until("\n", said)
        assert terminal.process.wait(60) == 1
        assert terminal.seen.rfind(SHOW_CURSOR) >= terminal.seen.rfind(HIDE_CURSOR)
        assert not [code for code in (HIDE_CURSOR, ERASE_LINE, UP) if code in terminal.seen[said:]]


def test_up_draws_its_instances_and_gives_the_terminal_back(tiny_model):
    """One of its processes is killed meanwhile: the row says so, and that another one was started."""
    with on_terminal("up", tiny_model, "--port", "0", "--mixed", "1", *SMALL) as terminal:
        ready = terminal.until("Ctrl-C ends it.")
        for words in ("instance", "KV blocks", "preempt", "restarts", "mixed-0", "router: serving", "0 hand-offs"):
            terminal.until(words, ready)
        engine = next(pid for pid in family(terminal.process.pid) if b"baton.runtime.engine" in command_of(pid))
        os.kill(engine, signal.SIGKILL)
        lost = terminal.until("killed by SIGKILL: starting another", ready)
        terminal.until("1 instances lost", lost)
        terminal.until("serving", terminal.until("mixed-0", lost))
        processes = family(terminal.process.pid)
        terminal.write("\x03")
        terminal.until("baton up: stopped")
        assert terminal.process.wait(60) == 0
        assert terminal.seen.rfind(SHOW_CURSOR) > terminal.seen.rfind(HIDE_CURSOR)
        assert gone(processes) == []


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_chat_erases_neither_what_is_typed_nor_what_is_answered(tiny_model):
    with on_terminal("chat", tiny_model, "--max-tokens", "8") as terminal:
        prompt = terminal.until("> ")
        assert terminal.seen.count(HIDE_CURSOR) == terminal.seen.count(SHOW_CURSOR)
        assert terminal.written_in(IDLE_SECONDS) == b""
        terminal.write("Hello")
        terminal.until("Hello")
        assert terminal.written_in(IDLE_SECONDS) == b"", "somebody writes over the line that is being typed"
        terminal.write("\r")
        answered = terminal.until(" tokens")
        terminal.until("> ", answered)
        terminal.written_in(0.3)
        assert terminal.written_in(IDLE_SECONDS) == b""
        after = terminal.seen[prompt:]
        assert not [code for code in (HIDE_CURSOR, ERASE_LINE, UP) if code in after], after
        everyone = family(terminal.process.pid)
        assert len(everyone) == 6, "chat, supervisor, front, its templates, engine, worker"
        terminal.write("/exit\r")
        assert terminal.process.wait(60) == 0
        assert not gone(everyone)


@pytest.mark.slow
def test_chat_says_why_its_server_did_not_start_and_leaves_nothing(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with on_terminal("chat", tmp_path) as terminal:
        terminal.until("baton chat: the model could not be started: ")
        terminal.until("\n")
        assert terminal.process.wait(60) == 1
        assert terminal.seen.rfind(SHOW_CURSOR) >= terminal.seen.rfind(HIDE_CURSOR)


def family_of(pid, count):
    """The process and its descendants, once there are so many."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found := family(pid)) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} processes"
        time.sleep(0.01)
    return found


ENDS = {"SIGHUP": signal.SIGHUP, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL, "the window is closed": None}


MOMENTS = ("loading", "at the prompt", "answering")
QUICK = {("SIGHUP", "loading"), ("SIGTERM", "at the prompt"), ("SIGKILL", "answering"), ("the window is closed", "answering")}


@pytest.mark.parametrize(
    ("end", "moment"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in product(ENDS, MOMENTS)],
)
def test_chat_takes_its_server_with_it(tiny_model, end, moment):
    with on_terminal("chat", tiny_model, "--max-tokens", "400") as terminal:
        if moment == "loading":
            terminal.until("loading")
        else:
            prompt = terminal.until("> ")
        if moment == "answering":
            terminal.write("Hello\r")
            terminal.until("\n", prompt)
        everyone = family_of(terminal.process.pid, 2 if moment == "loading" else 5)
        if ENDS[end] is None:
            terminal.hang_up()
        else:
            os.kill(terminal.process.pid, ENDS[end])
        terminal.process.wait(60)
        assert not gone(everyone, 30.0)
