"""Keeps a directory of objects below a size, without an index.

The folders are divided into groups, and each group has an equal share of the quota (keys are digests: the shares fill evenly).
A group is scanned when this process first writes to it, when it seems full, and after every eighth of its share written: other
engines write to the same directory. The oldest objects are removed first, until a tenth of the share is free.

Nothing is scanned at the start, and only two numbers per group are kept. Threads update those without a lock: the next scan
corrects a lost update. Two threads or engines that evict at once choose the same files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from time import time

from baton.kvcache.storage.file_names import FOLDERS, Entry, entries

OBJECTS_PER_GROUP_MIN = 64
PAGE = 4096


def on_disk(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Quota:
    def __init__(self, root: str, bytes_max: int, object_bytes: int, evicted: Callable[[int, int], None]) -> None:
        groups = FOLDERS
        while groups > 1 and bytes_max // groups < OBJECTS_PER_GROUP_MIN * on_disk(object_bytes):
            groups //= 2
        self.root = root
        self.share = bytes_max // groups
        self._folders_per_group = FOLDERS // groups
        self._used: list[int | None] = [None] * groups
        self._written = [0] * groups
        self._evicted = evicted

    def make_room(self, folder: int, nbytes: int) -> None:
        """Remove old objects before one is written, if the directory is full. Raises OSError if it cannot be read."""
        group, size = folder // self._folders_per_group, on_disk(nbytes)
        used = self._used[group]
        if used is None or used + size > self.share or self._written[group] > self.share // 8:
            used = self._scan(group, size)
        self._used[group] = used + size
        self._written[group] += size

    def evict(self, folder: int, nbytes: int) -> None:
        """Free at least `nbytes` if possible: the disk is full, whatever the quota. Half of a group at a time, from this
        folder's group on."""
        groups, freed = len(self._used), 0
        for step in range(groups):
            group = (folder // self._folders_per_group + step) % groups
            found, used = self._entries(group)
            left = self._remove_oldest(found, used, used // 2)
            self._used[group] = left
            freed += used - left
            if freed >= nbytes:
                return

    def _scan(self, group: int, size: int) -> int:
        """Measure the group, and remove its oldest objects if `size` more bytes exceed its share. Returns the bytes in use."""
        found, used = self._entries(group)
        self._written[group] = 0
        if used + size <= self.share:
            return used
        left = self._remove_oldest(found, used, min(self.share * 9 // 10, self.share - size))
        if left + size > self.share:
            raise OSError(errno.EDQUOT, "the quota is used up by files that cannot be removed", self.root)
        return left

    def _entries(self, group: int) -> tuple[list[Entry], int]:
        now, first = time(), group * self._folders_per_group
        found = [entry for folder in range(first, first + self._folders_per_group) for entry in entries(self.root, folder, now)]
        return found, sum(on_disk(entry.nbytes) for entry in found)

    def _remove_oldest(self, found: list[Entry], used: int, target: int) -> int:
        """Remove the objects that were used longest ago until at most `target` bytes are in use. Returns the bytes in use."""
        count = nbytes = 0
        for entry in sorted(found, key=lambda entry: entry.used_at):
            if used <= target:
                break
            try:
                os.unlink(entry.path)
                count, nbytes = count + 1, nbytes + entry.nbytes
            except FileNotFoundError:  # another engine has removed the file first
                pass
            except OSError:  # we may not remove it: the next one is removed instead
                continue
            used -= on_disk(entry.nbytes)
        self._evicted(count, nbytes)
        return used
