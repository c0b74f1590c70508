"""Bounds a process that works on somebody else's input, and may be killed at any moment."""

from __future__ import annotations

import contextlib
import resource
import signal


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
