"""The secret file that routers and instances of one cluster share. Only its owner may read it, or the group of this process too
if it is root's, as Kubernetes mounts secrets of a pod with fsGroup (root:GROUP, mode 0440).

    SECRET            the first line proves who we are; a peer may prove itself with any line
    SECRET
    revoked NAME      an instance of this name, or with this name in its certificate, is refused
    # comment

A secret is never in a configuration, a log or a process list: those have the path. keyring.py reads the file again when it
changes.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from baton.errors import InvalidConfig

SECRET_BYTES_MIN: Final = 32
SECRET_BYTES_MAX: Final = 4096
FILE_BYTES_MAX: Final = 256 * 1024
REVOKED: Final = b"revoked"


class Secret:
    """The bytes of a secret, wrapped so that no message or traceback shows them by accident. Also the Credentials
    (credentials.py) of a cluster with this secret alone."""

    __slots__ = ("key",)

    def __init__(self, key: bytes) -> None:
        self.key = key

    def __repr__(self) -> str:
        return "<Secret>"

    def secrets(self) -> tuple[Secret, ...]:
        return (self,)

    def tls(self) -> None:
        return None

    def revoked(self, names: Collection[str]) -> str:
        return ""


class Secrets(NamedTuple):
    """Content of a secret file."""

    secrets: tuple[Secret, ...]
    "The cluster's secrets, at least one. We prove ourselves with the first; peers with any."
    revoked: frozenset[str] = frozenset()
    "Names of refused instances."


def create_secret(path: str | Path) -> Secret:
    """Create a secret file: 256 bits from the operating system, as text. Never overwrites a file."""
    content = secrets.token_hex(SECRET_BYTES_MIN)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)  # whatever the umask is
        file.write(content + "\n")
    return Secret(content.encode())


def read_secrets(path: str | Path) -> Secrets:
    """Read a secret file. Raises InvalidConfig with the fault and the remedy."""
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
        content = os.read(fd, FILE_BYTES_MAX + 1)
    finally:
        os.close(fd)
    try:
        return parse_secrets(content)
    except ValueError as error:
        raise InvalidConfig(f"cluster secret {path}: {error}; {_HOW}") from None


def parse_secrets(content: bytes) -> Secrets:
    """The content of a secret file. Raises ValueError with the fault, without any secret."""
    if len(content) > FILE_BYTES_MAX:
        raise ValueError(f"holds more than {FILE_BYTES_MAX} bytes; {_BOUNDS}")
    secrets: list[Secret] = []
    revoked: list[str] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not (text := line.strip()) or text.startswith(b"#"):
            continue
        word, *names = text.split()
        if word == REVOKED:
            if len(names) != 1:
                raise ValueError(f"line {number} revokes {len(names)} names; write one per line: revoked NAME")
            revoked.append(names[0].decode("utf-8", "replace"))
        elif not SECRET_BYTES_MIN <= len(text) <= SECRET_BYTES_MAX:
            raise ValueError(f"line {number} holds {len(text)} bytes; {_BOUNDS}")
        else:
            secrets.append(Secret(text))
    if not secrets:
        raise ValueError(f"holds no secret; {_BOUNDS}")
    return Secrets(tuple(secrets), frozenset(revoked))


def access_fault(status: os.stat_result, user: int, groups: Collection[int]) -> str:
    """Return the reason why a process of this user and these groups does not trust the file, with {path} for its path. Empty:
    it does."""
    group_reads = status.st_uid == 0 and status.st_gid in groups
    if status.st_mode & (0o037 if group_reads else 0o077):
        mode = stat.S_IMODE(status.st_mode)
        return f"others may read or write it (mode {mode:04o}); do: chmod {'640' if group_reads and user else '600'} {{path}}"
    return "" if status.st_uid in (user, 0) else f"belongs to another user (uid {status.st_uid})"


_BOUNDS: Final = f"{SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} are wanted, one secret per line"
_HOW: Final = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE), and give all of the cluster the same"
