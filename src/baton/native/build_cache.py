"""The cache of compiled kernels: code that this process runs, so it must be our own and complete. A file's name identifies its
sources and its content:

    baton-VARIANT-FINGERPRINT-CONTENT.so     FINGERPRINT: of sources, flags, compiler    CONTENT: of the file's own bytes

So an existing file is the right one, and a truncated or modified one is detected before it is loaded. Files and folder belong
to this user (or to root), and no other user may write to them. The most recently used builds of each variant are kept: several
installations may share the folder.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from baton.errors import EngineError

BUILDS_KEPT = 4
"""Number of builds kept per variant."""
SCRATCH = ".build-"
SCRATCH_SECONDS_MAX = 3600.0
"""Age in seconds above which scratch folders are left from killed compilations."""


class Untrusted(EngineError):
    """Another user could place code in the folder."""


def user_cache(name: str) -> Path:
    """A cache folder of this user. Raises RuntimeError if there is no home folder and XDG_CACHE_HOME is not set."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "baton" / name


def open_folder(folder: Path) -> None:
    """Creates the folder, for this user only. Raises Untrusted if others could have written to it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if not _trusted_owner(found):
        raise Untrusted(
            f"{folder} belongs to user {found.st_uid}: code in it is not loaded; set XDG_CACHE_HOME to a folder of your own"
        )
    if found.st_mode & 0o022:
        folder.chmod(0o700)


def find(folder: Path, stem: str) -> Path | None:
    """The library with this prefix, if it is ours and complete; others are deleted."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        if _ours(path) and _content(path) == path.stem.rsplit("-", 1)[1]:
            with suppress(OSError):  # a read-only cache
                os.utime(path)
            return path
        discard(path)
    return None


def install(made: Path, folder: Path, stem: str) -> Path:
    """Move a new library to its final name, which contains a digest of its content. Returns the new path."""
    made.chmod(0o700)
    target = folder / f"{stem}-{_content(made)}.so"
    made.replace(target)
    return target


def discard(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def tidy(folder: Path, variant: str) -> None:
    """Removes old builds, and scratch folders of killed compilations."""
    used = sorted(((_used(path), path) for path in folder.glob(f"baton-{variant}-*.so")), reverse=True)
    for _, path in used[BUILDS_KEPT:]:
        discard(path)
    for scratch in folder.glob(f"{SCRATCH}*"):
        if time.time() - _used(scratch) > SCRATCH_SECONDS_MAX:
            shutil.rmtree(scratch, ignore_errors=True)


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0


def _trusted_owner(found: os.stat_result) -> bool:
    return found.st_uid in (os.geteuid(), 0)


def _ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and _trusted_owner(found) and not found.st_mode & 0o022


def _content(path: Path) -> str:
    try:
        return sha256(path.read_bytes()).hexdigest()[:20]
    except OSError:
        return ""
