"""Child processes: started with inherited files, killed with their parent.

A child gets its settings through an inherited, nameless file (so that no key shows in a process list or on a disk), its
channels as inherited sockets, and asks the kernel to be killed if its parent dies. It runs in a session of its own: Ctrl-C
reaches only the supervisor, which ends the others in order.

Processes of one server are of one build: their messages have no versions to agree on. A child of another build than its parent
(the package was updated while the server ran, and a lost worker is replaced) reports that and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

import msgspec

from baton.protocol.codec import encode
from baton.protocol.control import StartFailed
from baton.runtime.processes import build_info

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.02


def start_child(
    module: str, settings: object, sockets: Mapping[str, socket.socket], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Run `python -m module SETTINGS_FD NAME=SOCKET_FD ...`. The sockets are the child's from now on.

    Call it on the main thread: the kernel treats the end of the thread that started a child as the end of its parent.
    """
    settings_fd = nameless_file(msgspec.json.encode((os.getpid(), build_info.INSTALLED, settings)))
    fds = {name: sock.fileno() for name, sock in sockets.items()}
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(settings_fd), *(f"{name}={fd}" for name, fd in fds.items())],
            pass_fds=[settings_fd, *fds.values()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    finally:
        os.close(settings_fd)
        for sock in sockets.values():
            sock.close()


def nameless_file(content: bytes, name: str = "baton-settings") -> int:
    """Create an unnamed file. It is complete before the child exists: unlike with a pipe, neither side waits, whatever the
    size."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.pwrite(fd, content, 0)  # leaves the position, which the child shares, at the start
    return fd


def begin_child(settings_type: type[T]) -> tuple[T, dict[str, socket.socket]]:
    """Bind the child's life to its parent's, and read the inherited settings and sockets (by name). Call it first."""
    settings_fd, *named = sys.argv[1:]
    with os.fdopen(int(settings_fd), "rb") as file:
        parent, build, settings = msgspec.json.decode(file.read(), type=tuple[int, str, msgspec.Raw])
    die_with_parent(parent)
    fds = {name: int(fd) for name, _, fd in (word.partition("=") for word in named)}
    for fd in fds.values():
        os.set_inheritable(fd, False)
    sockets = {name: socket.socket(fileno=fd) for name, fd in fds.items()}
    if build != build_info.INSTALLED:
        _end_as_other_build(build, sockets)
    return msgspec.json.decode(settings, type=settings_type), sockets


def _end_as_other_build(parents: str, sockets: Mapping[str, socket.socket]) -> NoReturn:
    """End before the settings are decoded: another build may have other settings."""
    spec = sys.modules["__main__"].__spec__
    name = "process" if spec is None else spec.name.removesuffix(".__main__").rpartition(".")[2]
    text = f"the new {name} is of build {build_info.INSTALLED}, and the process that starts it of {parents}"
    failed = StartFailed(f"{text}: Baton was updated while the server was running; restart the whole server")
    with contextlib.suppress(KeyError, OSError):
        sockets["control"].sendall(encode(failed))
    sys.exit(1)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process with its parent. Where the kernel cannot, the end of the parent's channel still ends
    every child."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before this call
        os._exit(1)


def freeze_gc_heap() -> None:
    """Call once a process has all long-lived objects: the collector need not traverse them again and again. In the front a full
    collection takes 10 to 20 ms, in which every stream stalls."""
    gc.collect()
    gc.freeze()


async def has_ended(process: subprocess.Popen[bytes], seconds: float, unless: Callable[[], bool] = lambda: False) -> bool:
    """Wait for the process, at most `seconds`, or until `unless`. The loop is never blocked; an ended process is reaped."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while process.poll() is None:
        if loop.time() >= deadline or unless():
            return False
        await asyncio.sleep(_LOOK_SECONDS)
    return True


def exit_text(code: int | None) -> str:
    """An exit status in words."""
    if code is None:
        return "does not end"
    if code < 0:
        known = -code in signal.Signals.__members__.values()
        return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"exited with status {code}"
