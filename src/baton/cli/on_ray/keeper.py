"""A keeper: the actor that runs one process tree on the node where Ray has placed it.

It is a plain class, so that it can be tested without Ray. Ray starts it again, here or on another node, when it ends; and it
ends when its tree ends. So a lost node, a killed keeper and a failed command are one case.

The tree is started in __init__: the kernel treats the end of the thread that started a process as the end of its parent, and
Ray runs methods in threads that come and go.
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
from baton.runtime.processes.children import exit_text
from baton.runtime.processes.private_folder import PrivateFolder
from baton.runtime.wire.listener import usable_port

SOON_SECONDS: Final = 20.0
"""A tree that ended within this time is started again after BACKOFF_SECONDS, else at once."""
BACKOFF_SECONDS: Final = 5.0
ASK_SECONDS: Final = 0.3
RETRY_SECONDS: Final = 5.0
"""An instance asks again for the address of a router that it did not get."""
EVERYWHERE: Final = ("0.0.0.0", "::", "[::]")
KILL_SECONDS: Final = 10.0
ROUTERS: Final = "keeper.routers"
OWN_TREE: Final = ssl._create_unverified_context()
"""For the question whether its own tree is ready: the certificate is for the name that clients use, not for this address."""


@dataclass(frozen=True, slots=True)
class KeeperOrders:
    """The command that a keeper runs. Equal in all lives of the keeper."""

    name: str
    command: str
    "router or serve."
    settings: dict[str, Any]
    "Keys of the command's --config file."
    secret: str
    routers: tuple[str, ...] = ()
    "Keepers of routers, for an instance."
    instances: tuple[str, ...] = ()
    "Keepers of instances, for a router."


class Keeper:
    def __init__(
        self, orders: KeeperOrders, host: str, peers: Callable[[str], Any], leave: Callable[[int], None] = os._exit
    ) -> None:
        """`host`: address of this node. `peers`: finds the keeper of a name, or raises. `leave`: ends this process."""
        self._orders, self._peers, self._leave = orders, peers, leave
        self._folder = PrivateFolder()
        self._routers: dict[str, str] = {}
        self._stopping = False
        is_router = orders.command == "router"
        self._address = str(Address(host=host, port=usable_port(host, 0))) if is_router else ""
        own = self._settings(host)
        self._port = own["port"]
        self._host = host if own["host"] in EVERYWHERE else own["host"]
        self._write_routers()
        self._began = time.monotonic()
        self._tree = self._start(own)
        threading.Thread(target=self._watch, daemon=True).start()
        threading.Thread(target=self._introduce, daemon=True).start()

    # For the driver and other keepers

    def address(self) -> str:
        """Where instances dial this router."""
        return self._address

    def url(self) -> str:
        scheme = "https" if self._orders.settings.get("ssl_certfile") and self._orders.command == "router" else "http"
        return f"{scheme}://{self._host if ':' not in self._host else f'[{self._host}]'}:{self._port}"

    def pid(self) -> int:
        return os.getpid()

    def add_router(self, name: str, address: str) -> None:
        """Tell the instance where a router is now. It dials the address within seconds."""
        self._routers[name] = address
        self._write_routers()

    def wait_ready(self, seconds: float) -> str:
        """Wait until the tree answers /ready. Returns what is wrong, if it does not; empty: it is ready."""
        deadline, why = time.monotonic() + seconds, "it does not answer"
        while time.monotonic() < deadline and self._tree.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url()}/ready", timeout=ASK_SECONDS * 10, context=OWN_TREE):
                    return ""
            except urllib.error.HTTPError as error:
                why = f"/ready answers {error.code}"
            except OSError:
                why = "it does not answer yet"
            time.sleep(ASK_SECONDS)
        return why if self._tree.poll() is None else f"{self._orders.name} {exit_text(self._tree.poll())}"

    def stop(self, seconds: float) -> str:
        """End the tree in order; its open requests may finish. Returns its exit in words."""
        self._stopping = True
        self._tree.terminate()
        try:
            self._tree.wait(seconds + KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._tree.kill()
            self._tree.wait(KILL_SECONDS)
        self._folder.remove()
        return exit_text(self._tree.returncode)

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
        """By renaming: the instance reads all of it, or what was there before. Several threads may write: each writes all."""
        new = self._folder.path / f"{threading.get_ident()}.routers"
        new.write_text("".join(f"{address}\n" for address in list(self._routers.values())), encoding="ascii")
        new.rename(self._folder.path / ROUTERS)

    def _watch(self) -> None:
        """When the tree ends by itself, the keeper ends too, and Ray starts another."""
        code = self._tree.wait()
        if self._stopping:
            return
        print(f"baton: {self._orders.name} {exit_text(code)}; it is started again", file=sys.stderr, flush=True)
        if time.monotonic() - self._began < SOON_SECONDS:
            time.sleep(BACKOFF_SECONDS)
        self._folder.remove()
        self._leave(1)

    def _introduce(self) -> None:
        """A router gives its address to all instances, so that they find it after it has moved. An instance asks for it until
        it has it: a router that is lost, or not there yet, does not answer."""
        for name in self._orders.instances:
            with contextlib.suppress(Exception):  # it asks when it comes
                self._peers(name).add_router(self._orders.name, self._address)
        for name in self._orders.routers:
            while name not in self._routers and not self._stopping:
                try:
                    self.add_router(name, self._peers(name).address())
                except Exception as error:
                    why = one_line(str(error))
                    print(f"baton: {self._orders.name}: no address of {name} yet: {why}", file=sys.stderr, flush=True)
                    time.sleep(RETRY_SECONDS)
