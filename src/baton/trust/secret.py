"""The secret that routers and instances of one cluster share: a file that only its owner may read, or a file of root that the
group of this process may read too, as Kubernetes mounts secrets of a pod with fsGroup (root:GROUP, mode 0440).

It is read once, when a process starts, and is never in a configuration, a log or a process list: those have the path.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final

from baton.errors import InvalidConfig

SECRET_BYTES_MIN: Final = 32
SECRET_BYTES_MAX: Final = 4096


class Secret:
    """The bytes, wrapped so that no message or traceback shows them by accident."""

    __slots__ = ("key",)

    def __init__(self, key: bytes) -> None:
        self.key = key

    def __repr__(self) -> str:
        return "<Secret>"


def create_secret(path: str | Path) -> Secret:
    """Create a secret file: 256 bits from the operating system, as text. Never overwrites a file."""
    content = secrets.token_hex(SECRET_BYTES_MIN)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)  # whatever the umask
        file.write(content + "\n")
    return Secret(content.encode())


def read_secret(path: str | Path) -> Secret:
    """Raises InvalidConfig with the fault and the remedy."""
    try:
        # Without O_NONBLOCK the open of a named pipe would block. The file is opened before it is checked, so that it cannot be
        # exchanged in between.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidConfig(f"cluster secret {path}: cannot be read ({why}); {_HOW}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidConfig(f"cluster secret {path}: is no file; {_HOW}")
        if fault := access_fault(status, os.geteuid(), {os.getegid(), *os.getgroups()}):
            raise InvalidConfig(f"cluster secret {path}: {fault.format(path=path)}")
        key = os.read(fd, SECRET_BYTES_MAX + 1).strip()
    finally:
        os.close(fd)
    if not SECRET_BYTES_MIN <= len(key) <= SECRET_BYTES_MAX:
        bounds = f"{len(key)} bytes; {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} are wanted"
        raise InvalidConfig(f"cluster secret {path}: holds {bounds}; {_HOW}")
    return Secret(key)


def access_fault(status: os.stat_result, user: int, groups: Collection[int]) -> str:
    """Return why a process of this user and these groups does not trust the file, with {path} for its path. Empty: it does."""
    group_reads = status.st_uid == 0 and status.st_gid in groups
    if status.st_mode & (0o037 if group_reads else 0o077):
        mode = stat.S_IMODE(status.st_mode)
        return f"others may read or write it (mode {mode:04o}); do: chmod {'640' if group_reads and user else '600'} {{path}}"
    return "" if status.st_uid in (user, 0) else f"belongs to another user (uid {status.st_uid})"


_HOW: Final = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE), and give all of the cluster the same"
