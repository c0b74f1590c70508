"""Inspects a directory of stored blocks from outside: contents and damage. Engines may use it meanwhile."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import time

from baton.kvcache.storage.file_names import FOLDERS, Entry, entries
from baton.kvcache.storage.files import READ_FLAGS
from baton.kvcache.storage.object import HEADER_BYTES, Fault, described, fault_of, header_fault


@dataclass(slots=True)
class LayoutTotals:
    """All objects of one layout and rank."""

    layout: str
    objects: int = 0
    nbytes: int = 0
    oldest: float = float("inf")
    newest: float = 0.0

    def add(self, entry: Entry) -> None:
        self.objects += 1
        self.nbytes += entry.nbytes
        self.oldest, self.newest = min(self.oldest, entry.used_at), max(self.newest, entry.used_at)


def walk(root: str) -> Iterator[tuple[int, list[Entry]]]:
    """Each folder: its number and its objects."""
    for folder in range(FOLDERS):
        yield folder, list(entries(root, folder, time()))


def file_fault(entry: Entry) -> Fault | None:
    """The fault of a file; None also if it was removed meanwhile. Raises OSError if it cannot be read."""
    try:
        descriptor = os.open(entry.path, READ_FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return "magic"
        if error.errno == errno.ENOENT:
            return None
        raise
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a FIFO would block, a device has no end
            return "magic"
        header, payload = file.read(HEADER_BYTES), file.read()
    fault = header_fault(header)
    if fault is not None:
        return fault
    key, layout = described(header)
    if key.hex() != entry.key:
        return "key"
    if not layout.object_name(key).endswith(entry.layout):
        return "layout"
    return fault_of(header, key, layout, memoryview(payload))


def remove(entry: Entry) -> bool:
    with suppress(FileNotFoundError):
        os.unlink(entry.path)
        return True
    return False
