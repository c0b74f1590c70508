"""Credentials from files: the secret file, and certificate, key and authorities for TLS.

Each use looks at the files, and reads them again after a change: secrets are rotated, instances revoked and certificates
renewed without a restart. A file that cannot be used after a change (truncated, missing, readable by others) is logged, and
what was read before stays in use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from threading import Lock
from time import time
from typing import Final, Generic, TypeVar

from baton.errors import InvalidConfig
from baton.trust.secret import Secret, Secrets, read_secrets
from baton.trust.tls import TlsContexts, TlsFiles

T = TypeVar("T")

logger = logging.getLogger("baton.trust")

Stamp = list[tuple[int, int, int, float]]
"""Stamp: inode, size and times of each file."""
SETTLED_SECONDS: Final = 2.0
"""Seconds in which a changed file may change again with the same times and size: clocks of file systems are coarse."""


class Reloaded(Generic[T]):
    """A value that is read from files, and again after one of them has changed."""

    def __init__(self, what: str, files: Sequence[str], read: Callable[[], T]) -> None:
        """Read the files. Raises InvalidConfig."""
        self._what, self._files, self._read = what, files, read
        self._fault = ""
        self._storing = Lock()
        "Lock, held while `_known` is compared and replaced, and not during a read."
        stamp = self._stamp()
        self._known: tuple[Stamp, T] = stamp, read()
        "The value, and the stamp as of before its read: a change during the read is noticed at the next call."

    def current(self) -> T:
        """The present value. Several threads may call this at once."""
        while True:
            known = self._known
            stamp = self._stamp()
            if stamp == known[0] and not any(time() - changed < SETTLED_SECONDS for _, _, _, changed in stamp):
                return known[1]
            read = stamp, self._reload(known[1], changed=stamp != known[0])
            with self._storing:
                if self._known is known:  # else another thread has read meanwhile, perhaps a newer file: compare again
                    self._known = read
                    return read[1]

    def _reload(self, before: T, *, changed: bool) -> T:
        try:
            value = self._read()
        except InvalidConfig as error:
            if str(error) != self._fault:
                self._fault = str(error)
                logger.warning("%s; what was read before stays in use", error)
            return before
        if changed or self._fault:
            self._fault = ""
            logger.info("%s %s: changed, and read again", self._what, self._files[0])
        return value

    def _stamp(self) -> Stamp:
        return [_stamp_of(file) for file in self._files]


def _stamp_of(file: str) -> tuple[int, int, int, float]:
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return (0, 0, 0, 0.0)
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime)


class Keyring:
    """Credentials (credentials.py) from files."""

    def __init__(self, secret_file: str, tls_files: TlsFiles | None = None) -> None:
        """Read the files. Raises InvalidConfig."""
        self._file = secret_file
        self._secrets: Reloaded[Secrets] = Reloaded("cluster secret", (secret_file,), lambda: read_secrets(secret_file))
        self._tls: Reloaded[TlsContexts] | None = None
        if tls_files is not None:
            named = tuple(file for file in tls_files if file)
            self._tls = Reloaded("cluster certificate", named, tls_files.contexts)

    def secrets(self) -> tuple[Secret, ...]:
        return self._secrets.current().secrets

    def tls(self) -> TlsContexts | None:
        return None if self._tls is None else self._tls.current()

    def revoked(self, names: Collection[str]) -> str:
        revoked = self._secrets.current().revoked
        found = next((name for name in names if name in revoked), None) if revoked else None
        return "" if found is None else f"{found} is revoked (in the cluster's secret file)"
