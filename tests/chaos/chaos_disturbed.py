"""A real cluster for a test: router, instances with disturbed workers and messengers, all of them watched through /proc.

    with DisturbedCluster(model, folder, {"prefill-0": "prefill", "decode-0": "decode"}).wait_ready() as cluster:
        with cluster.held("decode-0", "pull"):      everybody who comes to that place waits there
            ...
            cluster.process("decode-0").send(signal.SIGKILL)

Processes by name: up, router, prefill-0 (its engine), prefill-0/worker, prefill-0/cache; further ranks prefill-0/worker.1 etc.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chaos_server import HELD, HERE, ON_DEVICE, USUAL, Process, Server, children, fields_of_serve, free_port, python_path, until

BELOW = {"chaos_node_worker": "worker", "chaos_cache": "cache"}


class DisturbedCluster(Server):
    def __init__(
        self,
        model: Path | str,
        scratch: Path,
        instances: dict[str, str],
        *,
        orders: dict[str, Any] | None = None,
        router: dict[str, Any] | None = None,
        transfer_address: str = "auto",
        certificate: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.port, self.instances = free_port(), instances
        self.gates = scratch / "gates"
        self.gates.mkdir(parents=True, exist_ok=True)
        private = scratch / "private"
        private.mkdir(mode=0o700)
        serve = {**USUAL, **ON_DEVICE, **settings}
        serve |= {"served_model_name": ["tiny"], "port": self.port, "log_level": "info"}
        all_settings = {
            "serve": fields_of_serve(model, serve),
            "router": {"handoff": "always", "handoff_tokens_min": 0, **(router or {})},
            "folder": str(private),
            "transfer_address": transfer_address,
            "certificate": certificate or {},
            "instances": {
                name: {"role": role, "orders": {"gates": str(self.gates), **(orders or {})}} for name, role in instances.items()
            },
        }
        self._out, self._err = scratch / "stdout", scratch / "stderr"
        self.roles = ["up", "router"]
        others = [f".{rank}" for rank in range(1, settings.get("tensor_parallel_size", 1))]
        for name in instances:
            self.roles += [name, *(f"{name}/{below}{rank}" for below in ("worker", "cache") for rank in ("", *others))]
        self.seen = {}
        environment = {**os.environ, "PYTHONPATH": python_path(HERE)}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "chaos_up", json.dumps(all_settings)], stdout=out, stderr=err, env=environment
            )

    def _found(self) -> dict[str, int]:
        found = {"up": self.popen.pid}
        for pid in children(self.popen.pid):
            module = _module(pid)
            if module == "baton.runtime.router":
                found["router"] = pid
            elif module == "chaos_node" and (name := _instance(pid)):
                found[name] = pid
        for name in self.instances:
            ranks = dict.fromkeys(BELOW.values(), 0)
            for pid in sorted(children(found[name])) if name in found else ():
                if (below := BELOW.get(_module(pid) or "")) is not None:
                    found[f"{name}/{below}" + (f".{ranks[below]}" if ranks[below] else "")] = pid
                    ranks[below] += 1
        return found

    def number_of(self, name: str, **labels: str) -> float:
        """Of a metric with these labels among others. Numbers of instances come once a second."""
        parts = [f'{key}="{value}"' for key, value in labels.items()]
        found = [
            value for line, value in self.metrics().items() if line.startswith(name) and all(part in line for part in parts)
        ]
        return sum(found)

    # Gates

    @contextmanager
    def held(self, name: str, place: str, after: int = 0) -> Iterator[Path]:
        """Gives the file that is there as soon as somebody is held. In the end the gate is open, for everybody."""
        armed, reached = (self.gates / f"{name}.{place}.{word}" for word in ("armed", "reached"))
        reached.unlink(missing_ok=True)
        armed.write_text(str(after))
        try:
            yield reached
        finally:
            armed.unlink(missing_ok=True)

    def open_all(self) -> None:
        for path in self.gates.iterdir():
            path.unlink(missing_ok=True)

    # Rest

    def wait_all_there(self) -> None:
        """Every instance has joined again, and none is faulty."""

        def there() -> bool:
            reply = self.ask("/v1/cluster")
            if reply.status != 200:
                return False
            states = {one["name"]: one["state"] for one in reply.json["instances"]}
            return all(states.get(name) == "alive" for name in self.instances)

        until(there, "all instances are there")

    def wait_idle(self) -> dict[str, float]:
        """Until nobody holds anything, anywhere."""

        def idle() -> dict[str, float] | None:
            numbers = self.metrics()
            return None if any(value for name, value in numbers.items() if _is_held(name)) else numbers

        return until(idle, "nothing is held any more")


def _is_held(metric: str) -> bool:
    name, _, labels = metric.partition("{")
    return any(name == held.partition("{")[0] and held.partition("{")[2].rstrip("}") in labels for held in HELD)


def _words(pid: int, what: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _module(pid: int) -> str | None:
    words = _words(pid, "cmdline")
    return words[words.index("-m") + 1] if "-m" in words[:-1] else None


def _instance(pid: int) -> str:
    orders = next((word.partition("=")[2] for word in _words(pid, "environ") if word.startswith("BATON_CHAOS=")), "{}")
    return str(json.loads(orders).get("name", ""))


def processes_of(cluster: DisturbedCluster, name: str) -> list[Process]:
    return [process for role, process in cluster.seen.items() if role == name or role.startswith(f"{name}/")]
