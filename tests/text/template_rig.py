"""For the tests of chat templates: the children of this process that render them, as /proc shows them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

HI = [{"role": "user", "content": "Hi"}]
NEVER_ENDS = "{% for a in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}"


def render_children(parent: int | None = None) -> list[int]:
    """Pids of the template processes of `parent`, of this process by default. A child belongs to the thread that began it."""
    found = []
    for thread in Path(f"/proc/{parent or os.getpid()}/task").iterdir():
        try:
            found += [int(pid) for pid in (thread / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [pid for pid in found if b"template_child" in read(f"/proc/{pid}/cmdline")]


def read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def cpu_ticks(pid: int) -> int:
    words = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(words[11]) + int(words[12]) if words else 0


def until(true: Callable[[], object], seconds: float = 30.0) -> None:
    """A hang guard, not a measure."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)


def gone(pid: int) -> bool:
    return b"template_child" not in read(f"/proc/{pid}/cmdline")  # a zombie has no command line
