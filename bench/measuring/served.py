"""A real server for a measurement: started with options, asked over HTTP, ended with all its processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measuring.machine import all_stats, tree

SOURCES = Path(__file__).parents[2] / "src"
START_SECONDS_MAX = 300.0
ANSWER_SECONDS_MAX = 600.0
CLOCK = os.sysconf("SC_CLK_TCK")


class Server:
    def __init__(self, scratch: Path, command: str = "serve", *, arguments: Sequence[str] = (), **settings: Any) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        self._log = (scratch / f"server-{self.port}.log").open("wb")
        self.popen = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "baton.cli.main",
                command,
                "--port",
                str(self.port),
                "--log-level",
                "warning",
                *arguments,
                *flags,
            ],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
            start_new_session=True,
        )

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline:
            try:
                self.get("/ready")
                return self
            except OSError:
                if self.popen.poll() is not None:
                    break
                time.sleep(0.2)
        raise RuntimeError(f"the server did not start: {Path(self._log.name).read_text()[-2000:]}")

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            content: bytes = answer.read()
            return content

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def metric(self, name: str) -> float:
        for line in self.get("/metrics").decode().splitlines():
            if line.startswith(name):
                return float(line.rpartition(" ")[2])
        return 0.0

    @property
    def cpu_seconds(self) -> float:
        """Of all its processes."""
        total = 0
        for pid in tree([self.popen.pid], all_stats()):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            total += int(fields[11]) + int(fields[12])
        return total / CLOCK

    def end(self) -> None:
        self.popen.send_signal(signal.SIGTERM)
        try:
            self.popen.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self._log.close()


@contextmanager
def served(
    scratch: Path, command: str = "serve", *, arguments: Sequence[str] = (), wait: bool = True, **settings: Any
) -> Iterator[Server]:
    """`wait=False`: it is not ready before others are."""
    server = Server(scratch, command, arguments=arguments, **settings)
    try:
        yield server.wait_ready() if wait else server
    finally:
        server.end()
