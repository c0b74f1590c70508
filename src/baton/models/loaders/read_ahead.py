"""Asks the system to fetch what comes next of a mapped file while its user still works on what is there.

Left to itself it fetches 128 KiB whenever somebody touches a page that is not in memory, and threads that walk through a file
of gigabytes wait for the disk most of the time.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

AHEAD_BYTES = 256 << 20
PIECE_BYTES = 128 << 10
"""Linux fetches no more for one call than its own read-ahead is set to (128 KiB by default), however much it is asked for."""


class ReadAhead:
    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self._asked = 0

    def reach(self, offset: int, nbytes: int) -> None:
        """These bytes are read now, and those behind them next. A file is asked for once, from its beginning to its end."""
        begin = max(self._asked, offset) // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(offset + nbytes + AHEAD_BYTES, len(self._buffer))
        if self._asked < end:
            self._asked = end
            with suppress(AttributeError, OSError, ValueError):  # a system that cannot be asked
                for piece in range(begin, end, PIECE_BYTES):
                    self._buffer.madvise(mmap.MADV_WILLNEED, piece, min(PIECE_BYTES, end - piece))
