"""Bytes of mapped model files, read by the system into memory of ours: without the fault for every page that a copy has.

A tensor that is a view of a mapped file is found by its address. What is not in a file (random weights, say) is copied.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from baton.errors import ModelFileBroken
from baton.models.files import MappedFile
from baton.models.raw_tensor import Bytes


class FileBytes:
    """To be closed. read() may be called from many threads."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._places: list[tuple[int, int, int]] = []
        "(address where the map begins, where it ends, descriptor)"
        for file in files:
            descriptor = os.open(file.path, os.O_RDONLY)
            if not os.path.samestat(os.fstat(descriptor), file.stat):
                os.close(descriptor)  # another file has its name now: the map still has the old one
                continue
            begin = np.frombuffer(file.buffer, np.uint8).ctypes.data
            self._places.append((begin, begin + len(file.buffer), descriptor))

    def read(self, content: Bytes, target: Bytes) -> None:
        """content, target: one run of bytes each, equally long."""
        address, size = content.ctypes.data, len(content)
        for begin, end, descriptor in self._places:
            if begin <= address and address + size <= end:
                _read(descriptor, address - begin, target)
                return
        np.copyto(target, content)

    def close(self) -> None:
        for _, _, descriptor in self._places:
            os.close(descriptor)
        self._places.clear()


def _read(descriptor: int, offset: int, target: Bytes) -> None:
    done, view = 0, target.data
    while done < len(target):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise ModelFileBroken("a file of weights became shorter while it was read; start again")
        done += count
