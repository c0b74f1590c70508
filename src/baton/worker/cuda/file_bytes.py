"""Reads bytes of mapped model files into our memory by system calls: without the page faults of a copy.

A tensor that is a view of a mapped file is found by its address. Tensors outside of files (random weights) are copied.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from baton.errors import ModelFileBroken
from baton.models.files import MappedFile
from baton.models.raw_tensor import Bytes


class FileBytes:
    """Bytes of mapped files. The object must be closed; read() is thread-safe."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._places: list[tuple[int, int, int]] = []
        "Mapped files: start of the map, end of the map, descriptor."
        for file in files:
            descriptor = os.open(file.path, os.O_RDONLY)
            if not os.path.samestat(os.fstat(descriptor), file.stat):
                os.close(descriptor)  # the name refers to another file now: the map still has the old one
                continue
            begin = np.frombuffer(file.buffer, np.uint8).ctypes.data
            self._places.append((begin, begin + len(file.buffer), descriptor))

    def read(self, content: Bytes, target: Bytes) -> None:
        """Read the bytes that `content` maps into `target`. Both are contiguous and of equal length."""
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
