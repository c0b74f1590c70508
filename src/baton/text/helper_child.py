"""The child's side of helper.py: `python -m MODULE MEMORY_BYTES_MAX`, its socket as stdin, where MODULE calls `run`.

The child may be killed at any moment, and holds no state that another could not rebuild. Its limits:

memory   RLIMIT_AS. When memory runs out the reply says so, and the process ends, because its heap may stay full.
time     the parent kills it at the deadline. A timer does so if the parent is gone (while idle: the end of the socket).
the rest no core file (it would hold prompts), no file can be written, and the OOM killer chooses it first.

    parent   a first message          child   "ready"
    parent   [seconds, request]       child   the reply to it
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Final

from baton.text.helper_wire import frame, receive, send

_TIMER_SECONDS_MORE: Final = 1.0

Answer = Callable[[Any], Any]
"""Function that computes the reply to a request."""


def run(begin: Callable[[Any], Answer], *, out_of_memory: Any) -> None:
    """Run the child. `begin` gets the first message. `out_of_memory`: the reply when memory runs out."""
    bound_this_process(int(sys.argv[1]))
    with socket.socket(fileno=0) as sock:
        # From here on no text may reach the log: it could contain a client's text.
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)
        try:
            serve(sock, begin, out_of_memory)
        except ConnectionError:  # the parent is gone
            return


def serve(sock: socket.socket, begin: Callable[[Any], Answer], out_of_memory: Any) -> None:
    """Serves until the parent closes the socket, or memory runs out."""
    answer = begin(receive(sock))
    send(sock, frame("ready"))
    reply = None
    while reply != out_of_memory:
        seconds, request = receive(sock)
        signal.setitimer(signal.ITIMER_REAL, seconds + _TIMER_SECONDS_MORE)
        try:
            reply = answer(request)
            message = frame(reply)
        except MemoryError:
            reply = out_of_memory
            message = frame(reply)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(sock, message)


def bound_this_process(memory_bytes_max: int) -> None:
    """Limits address space; disables core files, which would hold prompts, and writing of files; makes the process the OOM
    killer's first choice. SIGALRM and SIGPROF end it: timers for a parent that is gone, and for too much CPU time."""
    _limit(resource.RLIMIT_AS, memory_bytes_max)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS has RLIMIT_AS and refuses it
        resource.setrlimit(kind, (value, value))
