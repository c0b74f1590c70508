"""Network namespaces on one bridge: each has an address of its own and all of its ports, as pods and machines have."""

from __future__ import annotations

import os
import subprocess
from typing import Any


class NoNamespaces(Exception):
    """This machine allows none, or has no `ip`."""


class Namespaces:
    def __init__(self) -> None:
        self._names: list[str] = []
        self._bridge = f"bt{os.getpid()}"
        self._subnet = f"198.18.{os.getpid() % 256}"  # for tests of networks (RFC 2544)
        try:
            ip("link", "add", self._bridge, "type", "bridge")
            ip("address", "add", f"{self._subnet}.254/24", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise NoNamespaces(f"network namespaces cannot be made: {error}") from None

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def add(self, number: int) -> str:
        """The address of a new namespace. `number`: from 1 to 253."""
        name, address = f"{self._bridge}-{number}", f"{self._subnet}.{number}"
        ip("netns", "add", name)
        self._names.append(name)
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", name, "master", self._bridge, "up")
        ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        return address

    def within(self, number: int) -> list[str]:
        """The beginning of a command that runs in the namespace."""
        return ["ip", "netns", "exec", f"{self._bridge}-{number}"]

    def close(self) -> None:
        for name in self._names:
            ip("netns", "delete", name)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True, check=False, timeout=60)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True, timeout=60)
