"""What a pod changes for its processes: the host name, names of Services, and unix sockets of other pods, which are invisible.

Python imports this file at the start of every process of a pod (chaos_pods.py).
"""

import os
import socket
from pathlib import Path
from typing import Any

NAMES = Path(os.environ.get("BATON_POD_NAMES", ""))
"""A file per Service, with an address per line."""
OWN = os.environ.get("TMPDIR", "")

getaddrinfo, connect = socket.getaddrinfo, socket.socket.connect


def look_up(host: Any, port: Any, *rest: Any, **named: Any) -> Any:
    if (NAMES / str(host)).is_file():
        found = [getaddrinfo(address, port, *rest, **named) for address in (NAMES / host).read_text().split()]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [each for one in found for each in one]
    return getaddrinfo(host, port, *rest, **named)


def connect_within(self: socket.socket, address: Any) -> None:
    if self.family == socket.AF_UNIX and not os.fsdecode(address).startswith(OWN):
        raise FileNotFoundError(2, "No such file or directory", address)
    connect(self, address)


if OWN:  # the process that renders templates has no environment
    socket.gethostname = lambda: os.environ["HOSTNAME"]
    socket.getaddrinfo = look_up
    socket.socket.connect = connect_within  # type: ignore[method-assign]
