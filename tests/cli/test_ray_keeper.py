"""Keepers of `baton up --on ray` without Ray: how instances find their router, whoever comes first."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.cli.on_ray import keeper as module
from baton.cli.on_ray.driver import wait_ready
from baton.cli.on_ray.keeper import Keeper, KeeperOrders
from baton.cli.say import Failed


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


@pytest.mark.parametrize(("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")])
def test_the_router_is_asked_where_it_listens(cluster, host, reached):
    given = KeeperOrders("router", "router", {"port": 8000, "host": host}, "s" * 64)
    cluster["router"] = Still(given, "127.0.0.1", cluster.__getitem__)
    assert cluster["router"].url() == f"http://{reached}:8000"


def test_there_is_no_cluster_to_wait_for():
    class Empty:
        name = "chat"

    with pytest.raises(Failed, match="Ray has no cluster chat"):
        wait_ready(Empty(), [], 1.0, print)  # type: ignore[arg-type]
