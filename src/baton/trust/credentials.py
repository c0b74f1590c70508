"""Credentials prove a process to its peers, and say which peers it accepts.

This is the interface of keyring.py, which reads them from files, and of a single Secret, which never changes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from baton.trust.secret import Secret
from baton.trust.tls import TlsContexts


class Credentials(Protocol):
    """Credentials of a process, asked for every connection: an answer may differ from the one before."""

    def secrets(self) -> Sequence[Secret]:
        """Secrets of the cluster. We prove ourselves with the first; peers with any."""
        ...

    def tls(self) -> TlsContexts | None:
        """The TLS contexts. None: connections are not encrypted."""
        ...

    def revoked(self, names: Collection[str]) -> str:
        """Return the reason why a peer with these names is refused, as text for the logs of both sides. Empty: it is
        accepted."""
        ...
