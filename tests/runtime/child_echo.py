"""A child for the tests: says what it got, then does what it is told over its socket."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from baton.protocol.control import StartFailed
from baton.runtime.processes.children import begin_child
from baton.runtime.wire.channel import BlockingChannel


def main() -> None:
    if "stop_early" in os.environ.get("CHILD_ORDERS", ""):
        os.kill(os.getpid(), signal.SIGSTOP)
    settings, sockets = begin_child(dict[str, Any])
    channel = BlockingChannel(sockets["control"])
    fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
    inheritable = [sock.fileno() for sock in sockets.values() if sock.get_inheritable()]
    channel.send(
        StartFailed(f"{len(settings['text'])} {len(sockets)} {len(fds)} {inheritable} {os.getsid(0) == os.getpid()} {sys.argv}")
    )
    while channel.receive() is not None:
        pass


if __name__ == "__main__":
    main()
