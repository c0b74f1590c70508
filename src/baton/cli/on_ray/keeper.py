"""A keeper: the actor that runs one process tree on the node where Ray has placed it.

It is a plain class, so that it can be tested without Ray. A tree that ends is started again by the rule of all processes
(core/restarts.py). A tree that is lost too often in a row ends its keeper; Ray starts a keeper that has ended, or whose node is
lost, here or on another node.

The kernel treats the end of the thread that started a process as the end of its parent, and Ray runs methods in threads that
come and go. So the first tree is started in __init__, and each later one in the thread that waits for its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from baton.addresses import Address
from baton.cli.say import one_line
from baton.core.restarts import Restarts
from baton.runtime.processes.children import exit_text
from baton.runtime.processes.private_folder import PrivateFolder
from baton.runtime.wire.listener import usable_port

LOSSES_MAX: Final = 5
"""Losses of the tree in a row after which the keeper ends: another node may do better."""
BACKOFF_SECONDS: Final = 5.0
"""Longest delay before a tree is started again, and the delay before the keeper ends."""
ASK_SECONDS: Final = 0.3
RETRY_SECONDS: Final = 5.0
"""Longest delay before an instance asks again for the address of a router that it did not get."""
EVERYWHERE: Final = ("0.0.0.0", "::", "[::]")
KILL_SECONDS: Final = 10.0
ROUTERS: Final = "keeper.routers"
OWN_TREE: Final = ssl._create_unverified_context()
"""For the question whether its own tree is ready: the certificate is for the name that clients use, not for this address."""


@dataclass(frozen=True, slots=True)
class KeeperOrders:
    """The command that a keeper runs, equal in all lives of the keeper."""

    name: str
    command: str
    "Command: router or serve."
    settings: dict[str, Any]
    "Keys of the command's --config file."
    secret: str
    routers: tuple[str, ...] = ()
    "Names of keepers of routers, for an instance."
    instances: tuple[str, ...] = ()
    "Names of keepers of instances, for a router."


class Keeper:
    def __init__(
        self, orders: KeeperOrders, host: str, peers: Callable[[str], Any], leave: Callable[[int], None] = os._exit
    ) -> None:
        """`host`: address of this node. `peers`: finds the keeper with a name, or raises. `leave`: ends this process."""
        self._orders, self._peers, self._leave = orders, peers, leave
        self._folder = PrivateFolder()
        self._routers: dict[str, str] = {}
        self._stopped = threading.Event()
        self._starting = threading.Lock()
        "Held while a tree is started or the event is set: no tree is started after `stop`."
        is_router = orders.command == "router"
        self._address = str(Address(host=host, port=usable_port(host, 0))) if is_router else ""
        own = self._settings(host)
        self._port = own["port"]
        self._host = host if own["host"] in EVERYWHERE else own["host"]
        self._write_routers()
        self._tree = self._start(own)
        threading.Thread(target=self._watch, args=(own,), daemon=True).start()
        threading.Thread(target=self._introduce, daemon=True).start()

    # For the driver and other keepers

    def address(self) -> str:
        """Address at which instances dial this router."""
        return self._address

    def url(self) -> str:
        scheme = "https" if self._orders.settings.get("ssl_certfile") and self._orders.command == "router" else "http"
        return f"{scheme}://{self._host if ':' not in self._host else f'[{self._host}]'}:{self._port}"

    def pid(self) -> int:
        return os.getpid()

    def add_router(self, name: str, address: str) -> None:
        """Give the instance the present address of a router. It dials the address within seconds."""
        self._routers[name] = address
        self._write_routers()

    def wait_ready(self, seconds: float) -> str:
        """Wait until the tree answers /ready. Returns what is wrong, if it does not or ends; empty: it is ready."""
        tree, deadline, why = self._tree, time.monotonic() + seconds, "it does not answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                seconds_left = min(left, ASK_SECONDS * 10)
                with urllib.request.urlopen(f"{self.url()}/ready", timeout=seconds_left, context=OWN_TREE):
                    return ""
            except urllib.error.HTTPError as error:
                why = f"/ready answers {error.code}"
            except OSError:
                why = "it does not answer yet"
            with contextlib.suppress(subprocess.TimeoutExpired):
                return f"{self._orders.name} {exit_text(tree.wait(min(left, ASK_SECONDS)))}"
        return why

    def stop(self, seconds: float) -> str:
        """End the tree in order; its open requests may finish. Returns its exit in words."""
        with self._starting:
            self._stopped.set()
        tree = self._tree
        tree.terminate()
        try:
            tree.wait(seconds + KILL_SECONDS)
        except subprocess.TimeoutExpired:
            tree.kill()
            tree.wait(KILL_SECONDS)
        self._folder.remove()
        return exit_text(tree.returncode)

    # The tree

    def _settings(self, host: str) -> dict[str, Any]:
        secret = self._folder.path / "cluster.secret"
        secret.touch(0o600)
        secret.write_text(self._orders.secret + "\n", encoding="ascii")
        own = {**self._orders.settings, "cluster_secret": str(secret)}
        if self._orders.command == "router":
            listen = Address(host=host, port=int(self._address.rpartition(":")[2]))
            return {"host": host, **own, "cluster_host": host, "cluster_port": listen.port}
        free = usable_port("127.0.0.1", 0)
        return {**own, "host": "127.0.0.1", "port": free, "router": [f"file:{self._folder.path / ROUTERS}"]}

    def _start(self, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
        path = self._folder.path / "command.settings"  # JSON is YAML
        path.touch(0o600)
        path.write_text(json.dumps(settings), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "baton.cli.on_ray.child",
            str(os.getpid()),
            self._orders.command,
            "--config",
            str(path),
        ]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def _write_routers(self) -> None:
        """Write the routers' addresses by renaming a file: the instance reads all of it, or the earlier one. Several threads
        may write: each writes all."""
        new = self._folder.path / f"{threading.get_ident()}.routers"
        new.write_text("".join(f"{address}\n" for address in list(self._routers.values())), encoding="ascii")
        new.rename(self._folder.path / ROUTERS)

    def _watch(self, settings: dict[str, Any]) -> None:
        """Start the tree again whenever it ends by itself; end the keeper when that was too often in a row."""
        restarts = Restarts(LOSSES_MAX, BACKOFF_SECONDS)
        while (delay := self._lost_tree(restarts)) is not None:
            if self._stopped.wait(delay):
                return
            with self._starting:
                if self._stopped.is_set():
                    return
                self._tree = self._start(settings)
        if not self._stopped.wait(BACKOFF_SECONDS):
            self._folder.remove()
            self._leave(1)

    def _lost_tree(self, restarts: Restarts) -> float | None:
        """Wait for the end of the tree. Returns the seconds before the next start; None: the keeper ends."""
        began = time.monotonic()
        code = self._tree.wait()
        if self._stopped.is_set():
            return 0.0
        delay = restarts.next_delay(time.monotonic() - began)
        what = "this keeper ends" if delay is None else "it is started again"
        print(f"baton: {self._orders.name} {exit_text(code)}; {what}", file=sys.stderr, flush=True)
        return delay

    def _introduce(self) -> None:
        """A router gives its address to all instances, so that they find it after it has moved. An instance asks for the
        address until it has it: a router that is lost, or not started yet, does not answer."""
        for name in self._orders.instances:
            with contextlib.suppress(Exception):  # the instance asks when it starts
                self._peers(name).add_router(self._orders.name, self._address)
        for name in self._orders.routers:
            delays = Restarts(None, RETRY_SECONDS)
            while name not in self._routers:
                try:
                    self.add_router(name, self._peers(name).address())
                except Exception as error:
                    why = one_line(str(error))
                    print(f"baton: {self._orders.name}: no address of {name} yet: {why}", file=sys.stderr, flush=True)
                    if self._stopped.wait(delays.next_delay() or 0.0):
                        return
