"""`baton up --on ray` on a real Ray of two nodes: keepers and nodes are lost while streams run, and every token is that of one
server. Ray takes 215 MB and a quarter of a minute to start: `make chaos` runs this."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_cluster import flags
from chaos_server import HERE, USUAL, Reply, Server, ask, free_port, python_path, until

pytest.importorskip("ray", reason="needs Ray: pip install 'baton-serve[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENVIRONMENT = {**os.environ, "PYTHONPATH": python_path(HERE), "RAY_USAGE_STATS_ENABLED": "0"}


class Ray:
    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "chaos_ray"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True
        )
        assert self.popen.stdout is not None
        self.address = next(line.split()[1] for line in self.popen.stdout if line.startswith("ADDRESS"))

    def order(self, word: str) -> None:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(f"{word}\n")
        self.popen.stdin.flush()
        assert next(line for line in self.popen.stdout if line.startswith("DONE")).split()[1] == word

    def end(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.wait(60)


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    cluster = Ray()
    yield cluster
    cluster.end()


def command(name: str, ray: Ray, *more: str) -> list[str]:
    at = ["--on", "ray", "--ray-address", ray.address, "--ray-insecure"]
    return [sys.executable, "-m", "baton.cli.main", name, *at, *more]


def run(name: str, ray: Ray, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(name, ray, *more), capture_output=True, text=True, env=ENVIRONMENT, timeout=240, check=False)


def trees() -> list[int]:
    """First processes of keepers' trees, and all below them."""
    found = subprocess.run(["pgrep", "-f", "baton.cli.on_ray.child"], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def body(number: int) -> dict[str, Any]:
    settings = {"max_tokens": 200, "temperature": 1.0, "seed": number, "return_token_ids": True, "ignore_eos": True}
    return {"prompt": f"{number:03d} on ray", "stream": True, **settings}


def tokens(reply: Reply) -> list[int]:
    assert reply.status == 200, reply.content
    assert reply.complete, reply.content[-400:]
    return [token for part in reply.events for token in part["choices"][0]["token_ids"]]


@pytest.fixture(scope="module")
def port(ray: Ray, tiny: Path) -> Iterator[int]:
    port = free_port()
    options = flags({**USUAL, "mixed": 2, "port": port, "host": "0.0.0.0", "served_model_name": "tiny", "max_model_len": 400})
    done = run("up", ray, str(tiny), "--detach", *options)
    assert done.returncode == 0, done.stderr
    assert "ready at http://" in done.stderr
    yield port
    run("down", ray)


def streams(port: int, alone: Server, numbers: range, disturb: Any) -> None:
    async def all_of_them() -> list[Reply]:
        asked = [asyncio.create_task(ask(port, "/v1/completions", body(number))) for number in numbers]
        await asyncio.to_thread(disturb)
        return list(await asyncio.gather(*asked))

    for number, reply in zip(numbers, asyncio.run(all_of_them()), strict=True):
        assert tokens(reply) == tokens(alone.ask("/v1/completions", body(number))), number


def test_answers_are_those_of_one_server(port: int, alone: Server):
    streams(port, alone, range(4), lambda: None)


def test_a_second_cluster_of_that_name_is_refused(port: int, ray: Ray, tiny: Path):
    done = run("up", ray, str(tiny), "--mixed", "1")
    assert done.returncode == 1
    assert "Ray has a cluster baton already" in done.stderr


def test_a_bundle_that_never_fits_is_named(port: int, ray: Ray, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    done = run("up", ray, str(tiny), "--mixed", "1", "--threads", "64", "--cluster-name", "large")
    assert done.returncode == 1
    assert "mixed-0 needs 64 CPUs; the node with most has" in done.stderr


def test_killed_trees_are_started_again(port: int, alone: Server):
    """A tree and, in a second round, the process group of everything that Ray runs for an instance."""

    def kill() -> None:
        victim = next(pid for pid in trees() if b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(victim, signal.SIGKILL)

    streams(port, alone, range(10, 16), kill)
    until(lambda: instances(port) == ["mixed-0", "mixed-1"], "both are there again")


def instances(port: int) -> list[str]:
    reply = asyncio.run(ask(port, "/v1/cluster", None))
    return sorted(one["name"] for one in reply.json["instances"] if one["state"] == "alive")


def keepers() -> dict[int, int]:
    """First processes of trees, by the process of their keeper: it is an argument of theirs."""
    found = {}
    for pid in trees():
        with contextlib.suppress(OSError):  # it has ended
            found[int(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[3])] = pid
    return found


def test_a_killed_keeper_takes_its_tree_along_and_both_come_again(port: int, alone: Server):
    before = keepers()
    keeper, first = next((keeper, pid) for keeper, pid in before.items() if b"\0serve\0" in command_line(pid))
    below = descendants(first)
    assert below
    streams(port, alone, range(30, 36), lambda: os.kill(keeper, signal.SIGKILL))
    until(lambda: not any(alive(pid) for pid in [first, *below]), "the tree has ended with its keeper")
    until(lambda: instances(port) == ["mixed-0", "mixed-1"], "both are there again", 180)
    until(lambda: len(keepers()) == len(before), "one tree for each keeper")
    assert keeper not in keepers()
    streams(port, alone, range(36, 38), lambda: None)


def lost(port: int) -> int:
    """Sessions of instances that the router has lost so far."""
    reply = asyncio.run(ask(port, "/v1/cluster", None))
    return int(reply.json["counters"]["instances_lost"])


def test_a_lost_node_costs_no_token(port: int, ray: Ray, alone: Server):
    before, trees_before = lost(port), set(trees())

    def lose() -> None:
        ray.order("lose")
        until(lambda: len(instances(port)) < 2, "the router has lost an instance", 60)

    streams(port, alone, range(20, 26), lose)
    assert lost(port) > before
    assert trees_before - set(trees()), "the node had a tree"
    ray.order("add")
    until(lambda: instances(port) == ["mixed-0", "mixed-1"], "Ray has found another place", 180)


def attached(ray: Ray) -> subprocess.Popen[str]:
    driver = subprocess.Popen(command("up", ray, "--attach"), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert driver.stderr is not None
    assert next(line for line in driver.stderr if "ready at" in line)
    return driver


def test_a_killed_driver_is_missed_by_no_stream_and_another_is_attached(port: int, ray: Ray, alone: Server):
    driver, before = attached(ray), keepers()

    def kill() -> None:
        driver.kill()
        driver.wait()

    streams(port, alone, range(40, 46), kill)
    assert keepers() == before, "nothing was started again"
    second = attached(ray)
    streams(port, alone, range(46, 48), lambda: None)
    second.kill()
    second.wait()


def test_attached_and_ended_nothing_is_left(port: int, ray: Ray):
    folders = private_folders()
    assert len(folders) >= 3
    below = [pid for first in trees() for pid in descendants(first)]
    driver = attached(ray)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(120) == 0
    until(lambda: not trees(), "no tree is left")
    until(lambda: not any(alive(pid) for pid in below), "nothing below them")
    until(lambda: not any(folder.exists() for folder in folders), "no secret, no socket")
    done = run("down", ray)
    assert "Ray has no cluster baton" in done.stderr


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    """Zombies are not."""
    return bool(command_line(pid))


def descendants(pid: int) -> list[int]:
    try:
        own = [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()]
    except OSError:
        return []
    return own + [below for child in own for below in descendants(child)]


def private_folders() -> set[Path]:
    """Of keepers: the folder of the settings is an argument of each tree."""
    lines = [command_line(pid).decode().split("\0") for pid in trees()]
    return {Path(line[line.index("--config") + 1]).parent for line in lines if "--config" in line}
