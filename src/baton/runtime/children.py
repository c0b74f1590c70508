"""Child processes: started with what they inherit, gone when their parent is.

A child gets its settings through an inherited pipe (so that no key shows in a process list), its channels as inherited
sockets, and asks the kernel to be killed if its parent dies. It runs in a session of its own: Ctrl-C reaches only the
supervisor, which ends the others in order.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1


def start_child(
    module: str, settings: object, sockets: Sequence[socket.socket], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Run `python -m module SETTINGS_FD SOCKET_FD ...`. The sockets are the child's from now on."""
    read, write = os.pipe()
    try:
        fds = [read, *(sock.fileno() for sock in sockets)]
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        with os.fdopen(write, "wb") as pipe:
            write = -1
            pipe.write(msgspec.json.encode((os.getpid(), settings)))
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)
    for sock in sockets:
        sock.close()
    return process


def begin_child(settings_type: type[T]) -> tuple[T, list[socket.socket]]:
    """The child's first act: tie its life to the parent's, take what it inherited."""
    settings_fd, *socket_fds = map(int, sys.argv[1:])
    with os.fdopen(settings_fd, "rb") as pipe:
        parent, settings = msgspec.json.decode(pipe.read(), type=tuple[int, settings_type])  # type: ignore[valid-type]
    die_with_parent(parent)
    return settings, [socket.socket(fileno=fd) for fd in socket_fds]


def die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def exit_text(code: int | None) -> str:
    """An exit status in words."""
    if code is None:
        return "is still running"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"
