"""A word in shared memory that a worker advances while it computes, and that its engine reads at any time.

A change means: the worker has made progress since the last read. So health checks do not wait behind plans, a long step is
distinguished from a hang, and a stopped process is noticed though it cannot send anything.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from typing import Final

PAGE_BYTES = mmap.PAGESIZE
WORD: Final = "Q"
"""Bytes of the word: 64 bits, in this machine's byte order, since both processes run on it."""


class ProgressWord:
    """The word in anonymous memory: no name in any file system, freed with the last process that has it."""

    def __init__(self, fd: int) -> None:
        """The object owns `fd` from now on."""
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._word = memoryview(self._map).cast(WORD)

    @classmethod
    def create(cls) -> ProgressWord:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("baton-progress", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, PAGE_BYTES)
        return cls(fd)

    @property
    def value(self) -> int:
        return self._word[0]

    def advance(self) -> None:
        """Advance the word. Called by the one thread that runs plans. The native library does the same, in that thread, with
        the word at `address`."""
        self._word[0] = (self._word[0] + 1) & 0xFFFF_FFFF_FFFF_FFFF

    @property
    def address(self) -> int:
        """Address of the word for the native library. Valid until close()."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        """Unmap the word. `address` must not be used any more."""
        self._word.release()
        self._map.close()
        os.close(self.fd)
