"""Lists, checks and removes the files of a directory from outside, of any layout. Engines may use it meanwhile."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from time import time

from baton.errors import InvalidConfig
from baton.kvcache.storage.file_names import FOLDERS, entries
from baton.kvcache.storage.files import READ_FLAGS
from baton.kvcache.storage.listing import Advance, StoredObject
from baton.kvcache.storage.object import HEADER_BYTES, Fault, described, fault_of, header_fault


class FileListing:
    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise InvalidConfig(f"{root} is no directory; give the DIR of --kv-storage file:DIR")
        self.place = str(root)

    def objects(self, advance: Advance) -> Iterator[StoredObject]:
        for folder in range(FOLDERS):
            advance(folder + 1, FOLDERS)
            for entry in entries(self.place, folder, time()):
                yield StoredObject(entry.path, entry.key, entry.identity, entry.nbytes, entry.used_at)

    def remove(self, found: Iterable[StoredObject], advance: Advance) -> int:
        removed = 0
        for number, entry in enumerate(found, 1):
            advance(number, 0)
            with suppress(FileNotFoundError):  # a server has removed the file first
                if os.stat(entry.place, follow_symlinks=False).st_mtime == entry.used_at:
                    os.unlink(entry.place)
                    removed += 1
        return removed


def file_fault(entry: StoredObject) -> Fault | None:
    """The fault of a file; None also if it was removed meanwhile. Raises OSError if it cannot be read."""
    try:
        descriptor = os.open(entry.place, READ_FLAGS)
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
    if not layout.object_name(key).endswith(entry.identity):
        return "layout"
    return fault_of(header, key, layout, memoryview(payload))
