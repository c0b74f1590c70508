"""Several ranks of a set as threads of one process: the library releases the interpreter's lock, and meets in shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.models.shard import Shard
from baton.native.exchange import RankExchange
from baton.native.library import Library

T = TypeVar("T")
NUMBERS = 1 << 18


def on_ranks(library: Library, ranks: int, run: Callable[[RankExchange], T], *, numbers: int = NUMBERS) -> list[T]:
    """The results of all ranks, or the first error."""
    fd = os.memfd_create("ranks")
    try:
        exchanges = [RankExchange(library, fd, Shard(rank, ranks), numbers, wait_seconds=60.0) for rank in range(ranks)]
    finally:
        os.close(fd)
    with ThreadPoolExecutor(ranks) as threads:
        return [future.result() for future in [threads.submit(run, exchange) for exchange in exchanges]]
