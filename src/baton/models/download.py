"""Progress of a download by another program (pip, the hub's library): a sentence before it begins, then bytes.

The bytes are measured in the folder into which that program writes, which works with every version and transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

WATCH_SECONDS = 0.2
JOIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks during the download of a model."""

    announce: Callable[[str], None] = lambda what: None
    "Called with a sentence before a long stage begins."
    progress: Callable[[int, int], None] = lambda done, total: None
    "Called with (bytes done, bytes in total)."


SILENT = Listener()


@contextmanager
def watched(folder: Path, total: int, progress: Callable[[int, int], None]) -> Iterator[None]:
    """Reports the growth of the folder until the block ends. The last report is (total, total), unless the block fails."""
    before, ended = folder_bytes(folder), Event()

    def watch() -> None:
        most = 0
        while not ended.wait(WATCH_SECONDS):
            most = max(most, min(folder_bytes(folder) - before, total))
            progress(most, total)

    progress(0, total)
    thread = Thread(target=watch, name="download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(JOIN_SECONDS)
    progress(total, total)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below the folder. Links are not followed: their targets are counted in their own place."""
    return sum(_file_bytes(path) for path in folder.rglob("*"))


def _file_bytes(path: Path) -> int:
    try:
        stat = path.lstat()
    except OSError:  # the file was renamed or removed in the meantime
        return 0
    return stat.st_size if path.is_file() and not path.is_symlink() else 0


def size_text(nbytes: int) -> str:
    """Size in decimal units, as in file managers."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.1f} GB"
    return f"{nbytes / 1e6:.0f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"
