"""Path of an object: DIR/ab/<key>-<identity>-r<rank>.kv, in one of 256 folders by the first byte of the key.

Keys are digests, so every folder holds an equal share of everything, and one folder is a sample of the whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

FOLDERS = 256
SUFFIX = ".kv"
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{16})-r(\d{1,5})\.kv")
_TEMPORARY = re.compile(r"\.[0-9a-f]{12}-\d+\.tmp")
TEMPORARY_SECONDS_MAX = 600.0
"""Age of a temporary file in seconds above which its writer has died."""


@dataclass(frozen=True, slots=True)
class Entry:
    path: str
    nbytes: int
    used_at: float
    "Time of last use in seconds of the wall clock: the modification time, which a read renews."

    @property
    def key(self) -> str:
        return os.path.basename(self.path)[:64]

    @property
    def identity(self) -> str:
        """Identity and rank, as in the object's name."""
        return os.path.basename(self.path)[65:].removesuffix(SUFFIX)


def folder_name(number: int) -> str:
    return f"{number:02x}"


def entries(root: str, folder: int, now: float) -> Iterator[Entry]:
    """The objects of one folder. Files removed meanwhile are left out, foreign names are ignored.

    Temporary files of dead writers are removed on the way. Raises OSError if the folder cannot be read.
    """
    try:
        found = os.scandir(f"{root}/{folder_name(folder)}")
    except FileNotFoundError:
        return
    with found:
        for item in found:
            ours = _NAME.fullmatch(item.name)
            if not ours and not _TEMPORARY.fullmatch(item.name):
                continue
            try:
                if item.is_dir(follow_symlinks=False):  # not created by us, and not removable like a file
                    continue
                stat = item.stat(follow_symlinks=False)
                if ours:
                    yield Entry(item.path, stat.st_size, stat.st_mtime)
                elif now - stat.st_mtime > TEMPORARY_SECONDS_MAX:
                    os.unlink(item.path)
            except FileNotFoundError:
                continue
