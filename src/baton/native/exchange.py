"""Sums and gathers over the ranks of a set, through memory that all of them have mapped (csrc/exchange.h).

All ranks make the same calls in the same order. A step of the decoder exchanges through the same memory.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from baton.errors import EngineError
from baton.models.raw_tensor import Floats
from baton.models.shard import Shard
from baton.native.library import Library, NativeExchange

HEAD_BYTES = 4096
"""Bytes before the first slot, as in csrc/exchange.h: a line per rank."""
LINE = 64
RANKS_MAX = HEAD_BYTES // LINE
WAIT_SECONDS = 600.0
"""Maximum wait for another rank. It is long because the ranks load weights between two exchanges."""
STEP_SECONDS = 3_600.0
"""The same in steps, whose limit is the engine's."""


class RankExchange:
    def __init__(self, library: Library, fd: int, shard: Shard, numbers: int, wait_seconds: float = WAIT_SECONDS) -> None:
        """`fd`: memory that the ranks share, empty at first; belongs to the caller. `numbers`: float32 of the largest exchange
        of a step. All ranks give the same."""
        self.rank, self.ranks = shard.rank, shard.ranks
        if self.ranks > RANKS_MAX:
            raise EngineError(f"{self.ranks} ranks: {RANKS_MAX} is the most")
        slot = -(-numbers * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
        size = HEAD_BYTES + 2 * self.ranks * slot
        os.ftruncate(fd, size)  # pages that are never written to take no memory
        self._map = mmap.mmap(fd, size)
        self._library = library
        address = np.frombuffer(self._map, np.uint8).ctypes.data
        self.native = NativeExchange(*(self.rank, self.ranks, slot, int(wait_seconds * 1e9), address))
        "The exchange as NativeDecoder's argument. Valid until close()."

    def sum(self, numbers: Floats) -> None:
        """Replaces the numbers by their sums over ranks, added in the order of ranks, so that every rank has the same bits."""
        if not numbers.flags.c_contiguous or numbers.dtype != np.float32:
            raise ValueError(f"{numbers.dtype} {numbers.shape}: not dense float32")
        if self._library.sum(self.native, numbers.ctypes.data, numbers.size):
            raise rank_missing(self.native)

    def gather(self, part: NDArray[np.generic]) -> NDArray[np.generic]:
        """Gathers the parts of all ranks, which have one shape: [ranks, *shape of the part]."""
        part = np.ascontiguousarray(part)
        out = np.empty((self.ranks, *part.shape), part.dtype)
        if self._library.gather(self.native, part.ctypes.data, part.nbytes, out.ctypes.data):
            raise rank_missing(self.native)
        return out

    def notes(self, note: bytes) -> list[bytes]:
        """Notes of all ranks, which have one length."""
        return [each.tobytes() for each in self.gather(np.frombuffer(note, np.uint8))]

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        return int(self.gather(np.array([number], np.int64)).min())

    def start_is_over(self) -> None:
        """From now on the engine ends a wait. It kills all ranks, also those that wait."""
        self.native.wait_most = int(STEP_SECONDS * 1e9)

    def close(self) -> None:
        """The memory is unmapped when no decoder uses it."""
        self._map = None  # type: ignore[assignment]


def rank_missing(exchange: NativeExchange) -> EngineError:
    seconds = exchange.wait_most / 1e9
    return EngineError(f"rank {exchange.missing - 1} did not answer rank {exchange.rank} within {seconds:g} seconds")
