"""Asks the system to prefetch the next part of a mapped file.

By default it fetches 128 KiB per page fault, and threads that read a file of gigabytes wait for the disk most of the time.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

AHEAD_BYTES = 256 << 20
PIECE_BYTES = 128 << 10
"""Bytes per call. Linux prefetches per call at most its read-ahead setting (128 KiB by default)."""


class ReadAhead:
    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self._asked = 0

    def reach(self, offset: int, nbytes: int) -> None:
        """Prefetches these bytes and the ones after them. Each byte is requested once, from the beginning of the file to its
        end."""
        begin = max(self._asked, offset) // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(offset + nbytes + AHEAD_BYTES, len(self._buffer))
        if self._asked < end:
            self._asked = end
            with suppress(AttributeError, OSError, ValueError):  # not supported by the system
                for piece in range(begin, end, PIECE_BYTES):
                    self._buffer.madvise(mmap.MADV_WILLNEED, piece, min(PIECE_BYTES, end - piece))
