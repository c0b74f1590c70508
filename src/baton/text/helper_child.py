"""The child's side of helper.py: `python -m MODULE MEMORY_BYTES_MAX`, its socket as stdin, where MODULE calls `run`.

It may be killed at any moment, and keeps nothing that another could not make again. What bounds it:

memory   RLIMIT_AS. Where it runs out the request is told so, and the process ends, because its heap may stay full.
time     the parent kills it at the deadline. A timer does so where the parent is gone (while idle, the end of the socket).
the rest no core file (it would hold prompts), no file can be written, and the kernel ends it first when memory runs out.

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
"""From a request to its reply."""


def run(begin: Callable[[Any], Answer], *, out_of_memory: Any) -> None:
    """`begin` gets the first message. `out_of_memory`: the reply to a request for which there is not enough."""
    bound_this_process(int(sys.argv[1]))
    with socket.socket(fileno=0) as sock:
        # From here on nothing may reach the log: it could repeat what a client sent.
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)
        try:
            serve(sock, begin, out_of_memory)
        except ConnectionError:  # the parent is gone
            return


def serve(sock: socket.socket, begin: Callable[[Any], Answer], out_of_memory: Any) -> None:
    """Until the parent closes the socket, or memory ran out."""
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
    """Address space; no core file, which would hold prompts; no file can be written; the kernel ends it first when memory runs
    out. SIGALRM and SIGPROF end it: a timer is for who waits for a parent that may be gone, and for who computes too long."""
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
    with contextlib.suppress(ValueError, OSError):  # macOS knows RLIMIT_AS and refuses it
        resource.setrlimit(kind, (value, value))
