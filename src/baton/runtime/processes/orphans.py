"""Reaps processes that have lost their parent, if the kernel makes this process their new parent.

A process whose parent has died belongs to process 1 of its container (or to a subreaper, prctl(2)). A killed engine leaves its
worker and its cache service so; they die with it, and stay zombies until their new parent waits for them. As process 1 we wait
for them. Our own children are awaited by the code that started them: a zombie is an orphan only if it is none of those and is
still there a second later.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Collection
from typing import Final

LOOK_SECONDS: Final = 1.0
PR_GET_CHILD_SUBREAPER: Final = 37


def reaps_orphans() -> bool:
    """Whether the kernel makes us the parent of orphaned processes."""
    if os.getpid() == 1:
        return True
    answer = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return answer.value == 1


class Orphans:
    """Reaps orphans on one loop, which must be the main thread's. `known`: process ids of our own children."""

    def __init__(self, known: Callable[[], Collection[int]]) -> None:
        self._known = known
        self._loop = asyncio.get_running_loop()
        self._seen: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.reaped = 0
        self._watching = reaps_orphans()
        if self._watching:
            self._loop.add_signal_handler(signal.SIGCHLD, self._reap_later)
            self._reap_later()  # reap those that ended before

    def close(self) -> None:
        if self._watching:
            self._loop.remove_signal_handler(signal.SIGCHLD)
        if self._timer is not None:
            self._timer.cancel()

    def _reap_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._reap)

    def _reap(self) -> None:
        """Wait for zombies that were already there at the last call and are no children of ours."""
        self._timer = None
        known = set(self._known())
        zombies = {pid for pid in _zombies_of(os.getpid()) if pid not in known}
        for pid in zombies & self._seen:
            with contextlib.suppress(ChildProcessError):  # the process was awaited elsewhere
                os.waitpid(pid, os.WNOHANG)
                self.reaped += 1
        self._seen = zombies - self._seen
        if self._seen:
            self._reap_later()


def _zombies_of(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, ppid = file.read().rpartition(b")")[2].split()[:2]
                if state == b"Z" and int(ppid) == parent:
                    found.append(int(name))
    return found
