"""A directory that only our user can enter, for sockets that need a name (and the secret of `baton up`); it lives as long as
its process.

The creator holds a lock on it (flock), which the kernel releases when the process ends, however it ends. So the next creator of
such a directory can distinguish abandoned ones from those in use, and removes them. Programs that clean up temporary files
(systemd-tmpfiles) leave a locked directory alone, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from baton.errors import InvalidConfig

logger = logging.getLogger("baton.engine")

PREFIX: Final = "baton-peer-"
OURS: Final = (".sock", ".secret", ".settings", ".routers", ".lock")
"""Suffixes of the names of its files."""
PATH_BYTES_MAX: Final = 80
"""Maximum length of the directory's path: the whole path of a socket has 107 bytes at most."""


NEW_SECONDS: Final = 60.0
"""Age in seconds below which an unlocked directory may still be locked by its creator, which takes microseconds."""


class PrivateFolder:
    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or usual_parent()
        remove_abandoned(parent)
        # The directory has another name until it is locked, so that no other process considers it abandoned.
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))  # 0700
        self._fd = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = parent / made.name.removeprefix(".")
        made.rename(self.path)

    @property
    def address(self) -> str:
        """Address of the only socket in the folder (kvcache/shared_memory.py)."""
        return f"unix:{self.path}/peer.sock"

    def address_of(self, rank: int) -> str:
        """Address of that rank's socket, where there are several ranks."""
        return f"unix:{self.path}/peer-{rank}.sock"

    def remove(self) -> None:
        """Remove the directory and the sockets in it, which are no longer used. Killed children have left sockets, too."""
        if self._fd >= 0:
            _remove(self.path, self._fd)
            os.close(self._fd)
            self._fd = -1
            remove_abandoned(self.path.parent)


def peer_folder(*, needed: bool) -> PrivateFolder | None:
    """Directory for the socket at which others may read our pool. None: no directory is possible, and none is needed."""
    if sys.platform != "linux":
        if needed:
            raise InvalidConfig("the roles prefill and decode need Linux: instances share memory")
        return None
    try:
        return PrivateFolder()
    except OSError as error:
        if needed:
            raise
        logger.warning("no other instance can read our KV pool: %s", error)
        return None


def usual_parent() -> Path:
    """The usual directory for temporary files, unless its path is too long for a socket's."""
    usual = Path(tempfile.gettempdir())
    return usual if len(os.fsencode(usual)) + len(PREFIX) + 10 <= PATH_BYTES_MAX else Path("/tmp")


def remove_abandoned(parent: Path) -> None:
    """Remove directories whose owner has ended. Those that cannot be opened belong to other users. A new one under its first
    name (with a dot) is not locked yet; the owner of an old one was killed in that moment."""
    for path in [*parent.glob(f"{PREFIX}*"), *parent.glob(f".{PREFIX}*")]:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                is_new = path.name.startswith(".") and time.time() - os.fstat(fd).st_mtime < NEW_SECONDS
                if os.fstat(fd).st_uid == os.getuid() and not is_new:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(path, fd)
            finally:
                os.close(fd)


def _remove(path: Path, fd: int) -> None:
    """Remove our files from the directory: sockets, secrets, files of keepers and directories of worker sets (numbers). If
    there are others, they stay, and so does the directory."""
    with contextlib.suppress(OSError):
        for name in os.listdir(fd):
            if name.endswith(OURS):
                os.unlink(name, dir_fd=fd)
            elif name.isdigit():
                shutil.rmtree(name, dir_fd=fd)
        path.rmdir()
