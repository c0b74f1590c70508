"""Keepers of `baton up --on ray` without Ray: how instances find their router, whoever comes first."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.cli.on_ray import keeper as module
from baton.cli.on_ray.driver import wait_ready
from baton.cli.on_ray.keeper import Keeper, KeeperOrders
from baton.cli.say import Failed
from baton.runtime.processes.private_folder import PrivateFolder


class Still(Keeper):
    """A keeper whose tree does nothing."""

    def _start(self, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
        self.settings = settings
        return subprocess.Popen(["sleep", "120"])


def until(question: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not question():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def orders(name: str, command: str, **peers: tuple[str, ...]) -> KeeperOrders:
    settings = {"port": 8000} if command == "router" else {}
    return KeeperOrders(name, command, settings, "s" * 64, **peers)


def routers_of(keeper: Still) -> list[str]:
    return Path(keeper.settings["router"][0].removeprefix("file:")).read_text().split()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    keepers: dict[str, Still] = {}
    yield keepers
    for keeper in keepers.values():
        keeper.stop(0.0)


def test_an_instance_that_comes_first_asks_until_the_router_is_there(cluster):
    asked: list[str] = []

    def peers(name: str) -> Still:
        asked.append(name)
        return cluster[name]  # KeyError: it is not there yet

    cluster["mixed-0"] = Still(orders("mixed-0", "serve", routers=("router",)), "127.0.0.1", peers)
    until(lambda: len(asked) > 2)
    assert routers_of(cluster["mixed-0"]) == []
    cluster["router"] = Still(orders("router", "router"), "127.0.0.1", peers)
    until(lambda: routers_of(cluster["mixed-0"]) == [cluster["router"].address()])


def test_a_router_that_comes_back_elsewhere_is_found(cluster):
    cluster["mixed-0"] = Still(orders("mixed-0", "serve"), "127.0.0.1", cluster.__getitem__)
    for _ in range(2):
        router = Still(orders("router", "router", instances=("mixed-0",)), "127.0.0.1", cluster.__getitem__)
        until(lambda router=router: routers_of(cluster["mixed-0"]) == [router.address()])
        router.stop(0.0)


def test_a_router_with_a_certificate_is_asked_over_https(cluster):
    given = KeeperOrders("router", "router", {"port": 8000, "ssl_certfile": "server.pem"}, "s" * 64)
    cluster["router"] = Still(given, "127.0.0.1", cluster.__getitem__)
    assert cluster["router"].url() == "https://127.0.0.1:8000"


@pytest.mark.parametrize(("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")])
def test_the_router_is_asked_where_it_listens(cluster, host, reached):
    given = KeeperOrders("router", "router", {"port": 8000, "host": host}, "s" * 64)
    cluster["router"] = Still(given, "127.0.0.1", cluster.__getitem__)
    assert cluster["router"].url() == f"http://{reached}:8000"


@pytest.mark.parametrize("killed", [False, True])
def test_no_file_of_a_keeper_is_left(killed: bool, monkeypatch: pytest.MonkeyPatch):
    """Its settings may have keys in them. What a killed one leaves, the next one on the machine removes."""
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: start(["sleep", "120"]))
    keeper = Keeper(orders("mixed-0", "serve"), "127.0.0.1", {}.__getitem__)
    keeper.add_router("router", "tcp://127.0.0.1:1")
    folder = keeper._folder.path
    assert len(list(folder.iterdir())) == 3
    if killed:
        os.close(keeper._folder._fd)  # as the kernel does
        keeper._folder._fd = -1
        PrivateFolder().remove()
    assert folder.exists() is not killed
    keeper.stop(0.0)
    assert not folder.exists()


def test_a_tree_that_ends_at_once_is_named_with_its_exit(monkeypatch: pytest.MonkeyPatch):
    """A model that this node does not have, say. The keeper ends too, and Ray starts another."""
    monkeypatch.setattr(module, "BACKOFF_SECONDS", 0.0)
    start, left, started = subprocess.Popen, list[int](), list[int]()

    def fails(command: list[str], **_: Any) -> subprocess.Popen[bytes]:
        started.append(1)
        return start(["sh", "-c", "exit 2"])

    monkeypatch.setattr(subprocess, "Popen", fails)
    keeper = Keeper(orders("mixed-0", "serve"), "127.0.0.1", {}.__getitem__, left.append)
    folder = keeper._folder.path
    assert keeper.wait_ready(60.0) == "mixed-0 exited with status 2"
    until(lambda: left == [1])
    assert len(started) == 1 + module.LOSSES_MAX
    assert not folder.exists()


def test_a_lost_tree_is_started_again_by_its_keeper(cluster):
    """Its address stays, so that nobody has to be told."""
    left: list[int] = []
    keeper = cluster["router"] = Still(orders("router", "router"), "127.0.0.1", {}.__getitem__, left.append)
    tree, address = keeper._tree, keeper.address()
    tree.kill()
    until(lambda: keeper._tree is not tree)
    assert (keeper._tree.poll(), keeper.address(), left) == (None, address, [])


def test_a_stopped_keeper_starts_no_tree_and_asks_nobody(monkeypatch: pytest.MonkeyPatch):
    """It ends while it waits before the next start, and before it asks again for its router."""
    monkeypatch.setattr(module.Restarts, "next_delay", lambda *_, **__: 3600.0)
    asked, threads = list[str](), threading.active_count()

    def peers(name: str) -> Still:
        asked.append(name)
        raise KeyError(name)

    keeper = Still(orders("mixed-0", "serve", routers=("router",)), "127.0.0.1", peers)
    tree = keeper._tree
    tree.kill()
    until(lambda: bool(asked))
    assert keeper.stop(0.0) == "was killed by SIGKILL"
    until(lambda: threading.active_count() == threads)
    assert (keeper._tree, asked) == (tree, ["router"])


def test_there_is_no_cluster_to_wait_for():
    class Empty:
        name = "chat"

    with pytest.raises(Failed, match="Ray has no cluster chat"):
        wait_ready(Empty(), [], 1.0, print)  # type: ignore[arg-type]
