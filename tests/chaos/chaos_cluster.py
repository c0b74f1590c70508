"""`baton up` for a test: started, watched through /proc and /v1/cluster, and certainly gone in the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from chaos_server import ON_DEVICE, USUAL, Process, Reply, ask, children, free_port, listens, parse_metrics, python_path, until

READY_SECONDS = 180.0
"""A cluster has many processes, and the machine of a test few cores."""


def flags(settings: dict[str, Any]) -> list[str]:
    named = [(f"--{name.replace('_', '-')}", value) for name, value in settings.items()]
    return [part for name, value in named for part in ((name,) if value is True else (name, str(value)))]


class Cluster:
    """`with Cluster(model, folder, prefill=1, decode=1, ...) as cluster`. Settings are options of `baton up`."""

    def __init__(self, model: Path | str, scratch: Path, **settings: Any) -> None:
        self.port = free_port()
        scratch.mkdir(parents=True, exist_ok=True)
        self._out, self._err = scratch / "stdout", scratch / "stderr"
        self.temporary = scratch / "tmp"
        self.temporary.mkdir(exist_ok=True)
        usual = {**USUAL, **ON_DEVICE, "handoff_tokens_min": 0}
        options = flags({**usual, **settings, "served_model_name": "tiny", "port": self.port})
        command = [sys.executable, "-m", "baton.cli.main", "up", str(model), "--plain", *options]
        # Sockets and secret of the cluster go here, and nothing may be left.
        environment = {**os.environ, "PYTHONPATH": python_path(), "TMPDIR": str(self.temporary)}
        self.seen: dict[int, Process] = {}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.popen = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.remember()
            if self.popen.poll() is None:
                self.stop(signal.SIGTERM, hurry=True)
            self.require_all_gone()
        except (AssertionError, subprocess.TimeoutExpired):
            for process in self.seen.values():
                process.send(signal.SIGKILL)
            if kind is None:
                raise
        finally:
            if kind is not None:
                print(self.output, self.errors, sep="\n")

    def stop(self, number: int = signal.SIGTERM, *, hurry: bool = False) -> int:
        """Exit status."""
        self.remember()
        self.popen.send_signal(number)
        if hurry:
            time.sleep(0.05)
            self.popen.send_signal(number)
        return self.popen.wait(90)

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def errors(self) -> str:
        return self._err.read_text(errors="replace")

    def remember(self) -> None:
        """Every process below us that there is now."""
        todo = [self.popen.pid]
        while todo:
            pid = todo.pop()
            if pid not in self.seen:
                try:
                    self.seen[pid] = Process(pid)
                except (FileNotFoundError, ProcessLookupError):
                    continue
            todo += children(pid)

    def wait_ready(self) -> Cluster:
        def ready() -> bool:
            assert self.popen.poll() is None, f"the cluster ended:\n{self.output}\n{self.errors}"
            return "Ctrl-C ends it." in self.output

        until(ready, "the cluster is ready", READY_SECONDS)
        self.remember()
        return self

    def require_all_gone(self) -> None:
        """No orphan, no listener, no socket, no directory, nothing in shared memory."""
        for process in self.seen.values():
            until(lambda process=process: not process.alive, f"process {process.pid} is gone", 30.0)
        until(lambda: not listens(self.port), "nobody listens any more", 30.0)
        assert os.listdir(self.temporary) == []
        assert not [name for name in os.listdir("/dev/shm") if "baton" in name]

    # HTTP

    def ask(self, path: str, body: Any = None, **options: Any) -> Reply:
        return asyncio.run(ask(self.port, path, body, **options))

    def metrics(self) -> dict[str, float]:
        return parse_metrics(self.ask("/metrics").content.decode())

    def view(self) -> dict[str, Any]:
        return self.ask("/v1/cluster").json

    def engine(self, name: str) -> Process:
        """The process of the instance of that name, once it has joined."""

        def joined() -> Process | None:
            found = [one for one in self.view()["instances"] if one["name"] == name]
            try:
                return Process(found[0]["pid"]) if found else None
            except (FileNotFoundError, ProcessLookupError):
                return None

        return until(joined, f"{name} has joined")

    def router(self) -> Process:
        """Its process is the one that runs that module."""
        for pid in children(self.popen.pid):
            if b"baton.runtime.router" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return Process(pid)
        raise AssertionError("there is no router")

    def wait_idle(self) -> dict[str, Any]:
        """Until nobody holds anything."""

        def idle() -> dict[str, Any] | None:
            view = self.view()
            held = [one["stats"][what] for one in view["instances"] for what in ("requests_open", "blocks_held", "running")]
            return None if view["open"] or view["queued"] or any(held) else view

        return until(idle, f"nothing is held any more: {self.view()}")
