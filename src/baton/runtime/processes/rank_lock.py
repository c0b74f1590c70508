"""A lock among the ranks of one instance, for memory that all of them take from the same machine.

Each compares its part with the memory that is free. At the same time, all would find room that only one of them has.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.errors import EngineError


@contextmanager
def one_rank_at_a_time(folder: str, seconds: float) -> Iterator[None]:
    """Hold the lock until the block, which reserves the memory, ends. `folder`: private to the instance. Empty: there is one
    rank. The kernel releases the lock of a process that dies. Raises EngineError if another rank keeps the lock for so many
    seconds."""
    if not folder:
        yield
        return
    with Path(folder, "memory.lock").open("w") as file:
        # flock has no deadline. A thread that still waits at the deadline ends with the process.
        waiting = threading.Thread(target=fcntl.flock, args=(file.fileno(), fcntl.LOCK_EX), daemon=True, name="rank lock")
        waiting.start()
        waiting.join(seconds)
        if waiting.is_alive():
            raise EngineError(f"another rank has been reserving its memory for {seconds:g} s, and this one waits for it")
        yield
