"""How a server ends, and goes on. What it says may find no reader: a pipe whose program has ended, one that nobody reads, a
terminal that is gone. Found by an audit: the supervisor waited for the reader, or ended because there was none."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_rig import BATON, ENVIRONMENT, family, gone

SMALL = ("--kv-memory-gib", "0.05", "--threads", "1", "--log-level", "debug")
LONG = {"prompt": "Hello", "max_tokens": 400, "n": 8, "ignore_eos": True, "stream": True}
PIPE_BYTES = 4096


class Server:
    """stderr is a pipe of ours, and as small as they come."""

    def __init__(self, *arguments: str | Path, command: str = "serve", before: Callable[[], object] = lambda: None) -> None:
        self.reading, writing = os.pipe()
        fcntl.fcntl(self.reading, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.process = subprocess.Popen(
            [*BATON, command, *map(str, arguments), "--port", "0", *SMALL],
            stdout=subprocess.PIPE,
            stderr=writing,
            stdin=subprocess.DEVNULL,
            text=True,
            env=ENVIRONMENT,
            preexec_fn=lambda: (signal.signal(signal.SIGHUP, signal.SIG_DFL), before()),  # the suite may run under nohup
        )
        os.close(writing)
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline()]
        while "Ctrl-C" not in lines[-1]:
            assert lines[-1], os.read(self.reading, PIPE_BYTES)
            lines.append(self.process.stdout.readline())
        self.port = int(next(line for line in lines if "chat page" in line).rstrip("/\n").rpartition(":")[2])
        self.family = family(self.process.pid)

    def ask(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def leave_the_pipe(self) -> None:
        os.close(self.reading)
        self.reading = -1

    def fill_the_pipe(self) -> None:
        """The log has a line for each of these."""
        for _ in range(PIPE_BYTES // 32):
            self.ask("GET", "/live").read()

    def kill_engine(self) -> None:
        engines = [pid for pid in family(self.process.pid) if b"baton.runtime.engine" in command_of(pid)]
        os.kill(engines[0], signal.SIGKILL)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 60.0
        while self.ask("GET", "/ready").status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        if self.reading >= 0:
            os.close(self.reading)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert gone(self.family) == []


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@contextmanager
def running(*arguments: str | Path, **options: Any) -> Iterator[Server]:
    server = Server(*arguments, **options)
    try:
        yield server
    finally:
        server.close()


@pytest.mark.slow
def test_the_reader_of_stderr_ends_and_running_answers_still_finish(tiny_model):
    """`baton serve 2>&1 | tee log`: the Ctrl-C that drains the server ends its reader too."""
    with running(tiny_model) as server:
        answer = server.ask("POST", "/v1/completions", LONG)
        answer.readline()
        server.leave_the_pipe()
        server.process.send_signal(signal.SIGINT)
        assert answer.read().endswith(b"data: [DONE]\n\n")
        assert server.process.wait(60) == 0


@pytest.mark.parametrize("reader", [pytest.param("has left", marks=pytest.mark.slow), "does not read"])
def test_an_engine_is_started_again_whoever_reads_stderr(tiny_model, reader):
    with running(tiny_model) as server:
        server.leave_the_pipe() if reader == "has left" else server.fill_the_pipe()
        server.kill_engine()
        server.wait_ready()
        assert server.end() == 0


@pytest.mark.slow
def test_a_cluster_goes_on_without_a_reader_of_stderr(tiny_model):
    with running(tiny_model, "--mixed", "1", command="up") as server:
        server.leave_the_pipe()
        server.kill_engine()
        server.wait_ready()
        assert server.end() == 0


@pytest.mark.slow
def test_a_terminal_that_is_closed_lets_running_answers_finish(tiny_model):
    with running(tiny_model) as server:
        answer = server.ask("POST", "/v1/completions", LONG)
        answer.readline()
        for _ in range(2):  # from the kernel, and from the shell
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.05)
        assert answer.read().endswith(b"data: [DONE]\n\n")
        assert server.process.wait(60) == 0


def test_under_nohup_a_terminal_that_is_closed_changes_nothing(tiny_model):
    with running(tiny_model, before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.ask("POST", "/v1/completions", {**LONG, "stream": False}).status == 200
        assert server.end() == 0


@pytest.mark.slow
def test_whoever_asks_a_server_to_end_again_and_again_gets_the_same_exit_code(tiny_model):
    with running(tiny_model) as server:
        while server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert server.process.returncode == 0


@pytest.mark.parametrize("closed", [*(pytest.param(one, marks=pytest.mark.slow) for one in ((0,), (2,))), (0, 2)])
def test_a_server_that_was_started_without_stdin_or_stderr_serves(tiny_model, closed):
    def close() -> None:
        for number in closed:
            os.close(number)

    with running(tiny_model, before=close) as server:
        assert server.ask("POST", "/v1/completions", {**LONG, "stream": False}).status == 200
        server.kill_engine()
        server.wait_ready()
        assert server.end() == 0
