"""A child for test_child_set.py. Its settings are its orders:

ready    says that it is      fails    says why it cannot start, and exits with 1
exits    with this status     peers    answers what comes from them, for as long as they are there
garbage  instead of a descriptor
answers  so many pings of its parent, and hangs at the next one
hangs_up when it is told something: closes the channels to its peers, and exits with this status a little later
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from typing import Any

from baton.protocol.control import LoadProgress, Pong, StartFailed
from baton.runtime.processes.children import begin_child
from baton.runtime.wire.channel import BlockingChannel
from baton.runtime.wire.descriptors import take_descriptor


def main() -> None:
    orders, sockets = begin_child(dict[str, Any])
    control = BlockingChannel(sockets["control"])
    if "fails" in orders:
        control.send(StartFailed(orders["fails"]))
        sys.exit(1)
    control.send(LoadProgress(orders["life"], os.getpid()))
    if "garbage" in orders:
        sockets["descriptors"].sendall(b"garbage")
    if "exits" in orders:
        sys.exit(orders["exits"])
    for _ in range(orders.get("answers", 0)):
        control.send(Pong(control.receive().number))
    if "answers" in orders:
        time.sleep(3600)
    if "hangs_up" in orders:
        sockets["control"].recv(1)
        for name in sockets.keys() - {"control", "descriptors"}:
            sockets[name].close()
        time.sleep(0.3)
        sys.exit(orders["hangs_up"])
    serve(sockets, orders.get("follows", False))


def serve(sockets: dict[str, socket.socket], follows: bool) -> None:
    """Until the control channel ends, or with `follows` that to a peer."""
    while True:
        for readable in select.select(list(sockets.values()), [], [])[0]:
            name = next((name for name, sock in sockets.items() if sock is readable), "")
            if not name:
                readable.close()  # its successor came in the same turn
                continue
            if name == "descriptors":
                received = take_descriptor(readable)
                if received is None:
                    del sockets[name]
                else:
                    message, fd = received
                    sockets[getattr(message, "name", "pool")] = socket.socket(fileno=fd)
            elif content := readable.recv(100):
                readable.sendall(content.upper())
            elif name == "control" or follows:
                sys.exit(0)
            else:
                del sockets[name]


if __name__ == "__main__":
    main()
