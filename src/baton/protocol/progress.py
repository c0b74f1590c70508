"""A word in shared memory that a worker advances while it computes, and that its engine reads whenever it likes.

It says one thing: something was done since you last looked. So health does not wait behind plans, a long honest step is
told from a hang, and a process that was stopped is noticed though it cannot say anything.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from typing import Final

PAGE_BYTES = mmap.PAGESIZE
WORD: Final = "Q"
"""64 bits, in this machine's order: both processes are on it."""


class ProgressWord:
    """Anonymous: no name in any file system, gone with the last process that has it."""

    def __init__(self, fd: int) -> None:
        """`fd` is this object's from now on."""
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
        """By the one thread that runs plans. The library does the same, in that thread, with the word at `address`."""
        self._word[0] = (self._word[0] + 1) & 0xFFFF_FFFF_FFFF_FFFF

    @property
    def address(self) -> int:
        """For the library. Valid until close()."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        """Nobody may have the address any more."""
        self._word.release()
        self._map.close()
        os.close(self.fd)
