"""Engines as processes. One at a time has the machine: the others are stopped (SIGSTOP) until their turn.

So every engine is loaded once, and one case after another is measured with all of them, seconds apart: a slow minute of the
machine hurts all alike. An engine runs in a session of its own, as a service would.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, ClassVar

from measuring.figures import NotMeasured
from measuring.machine import all_stats, tree

ORDER_SECONDS_MAX = 600.0
START_SECONDS_MAX = 420.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Run in a child before it becomes another program. However the bench ends, no paused engine is left behind."""
    if hasattr(LIBC, "prctl"):
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    ends_with_stdin: ClassVar[bool] = False

    def __init__(self, command: Sequence[str], log: IO[str], environment: Mapping[str, str]) -> None:
        self.began = time.perf_counter()
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def signal_all(self, number: signal.Signals) -> None:
        """To the process and all below it, whatever sessions they are in."""
        for pid in tree([self.pid], all_stats()):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def pause(self) -> None:
        self.signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal_all(signal.SIGCONT)

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def stop(self) -> None:
        """Asked first, made to after a while."""
        self.resume()
        assert self.popen.stdin is not None
        with suppress(BrokenPipeError):
            self.popen.stdin.close()
        if self.ends_with_stdin and self._ended_within(10):
            return
        self.popen.terminate()
        if not self._ended_within(40):
            self.signal_all(signal.SIGKILL)
            self.popen.wait()

    def _ended_within(self, seconds: float) -> bool:
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


class Driver(Process):
    """An engine behind JSON lines: the programs *_driver of bench/peers."""

    ends_with_stdin = True

    def wait_ready(self) -> dict[str, Any]:
        """What it says of itself."""
        said = self._read(START_SECONDS_MAX)
        if "error" in said:
            raise NotMeasured(said["error"])
        return said

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps(order) + "\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            raise NotMeasured("its process ended (see --log)") from None
        return self._read(ORDER_SECONDS_MAX)

    def generate(self, prompts: Sequence[Sequence[int]], output: int, **more: Any) -> dict[str, Any]:
        answer = self.ask(prompts=prompts, output=output, **more)
        if "error" in answer:
            raise NotMeasured(answer["error"])
        if answer["tokens"] != len(prompts) * output:
            raise NotMeasured(f"{answer['tokens']} tokens where {len(prompts) * output} were asked for")
        return answer

    def _read(self, seconds_max: float) -> dict[str, Any]:
        assert self.popen.stdout is not None
        watchdog = threading.Timer(seconds_max, self.signal_all, [signal.SIGKILL])
        watchdog.start()
        try:
            for line in self.popen.stdout:
                if line.startswith("{"):
                    return dict(json.loads(line))
        finally:
            watchdog.cancel()
        raise NotMeasured(f"its process ended with status {self.popen.wait()} (see --log)")


class HttpServer(Process):
    """An engine behind HTTP. Ready when /health says 200."""

    def __init__(self, command: Sequence[str], log: IO[str], environment: Mapping[str, str], port: int) -> None:
        super().__init__(command, log, environment)
        self.port = port
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        assert self.popen.stdout is not None
        for _ in self.popen.stdout:
            pass

    def wait_ready(self) -> float:
        """Seconds from the start of the process."""
        while time.perf_counter() - self.began < START_SECONDS_MAX:
            if self.popen.poll() is not None:
                raise NotMeasured(f"its server ended with status {self.popen.returncode} (see --log)")
            if self._healthy():
                return time.perf_counter() - self.began
            time.sleep(0.02)
        raise NotMeasured(f"its server was not ready in {START_SECONDS_MAX:.0f} s")

    def _healthy(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as sock:
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                return b" 200 " in sock.recv(64)
        except OSError:
            return False


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def busy_neighbour() -> Iterator[int]:
    """A process that computes and never waits, in a session of its own: the kernel may share the cores between sessions."""
    hog = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], start_new_session=True, preexec_fn=end_with_parent)
    try:
        time.sleep(0.2)
        yield hog.pid
    finally:
        hog.kill()
        hog.wait()
