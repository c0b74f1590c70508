"""Paths on which prompts really arrive. Roles and addresses promise that an instance can read another; only a copy proves it.

    hand-offs in a row of which almost nothing arrived   1, 2: no change   3: not tried for 2 s   4: for 4 s ... 64 s
    a hand-off that arrived                              the count starts anew

A failed hand-off computes its prompt twice. While a path is not tried, decode computes prompts itself at once (and searches the
shared storage tier first, if there is one). After that time one hand-off shows whether the path works again.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from baton.core.cluster.events import Session
from baton.protocol.ids import Instant

FREE_FAILURES: Final = 2
SECONDS: Final = 2.0
DOUBLINGS_MAX: Final = 5


class FailedPath(NamedTuple):
    failures: int
    "Number of failed hand-offs in a row."
    until: Instant
    "Time before which no hand-off is tried."
    fault: str
    "Reason why the last copy failed, as the reader reports. Empty: unknown."


class Paths:
    """Peers that one instance failed to read from. At most one entry per present peer (`forget`)."""

    __slots__ = ("_failed",)

    def __init__(self) -> None:
        self._failed: dict[Session, FailedPath] = {}

    def __len__(self) -> int:
        return len(self._failed)

    def failed(self) -> dict[Session, FailedPath]:
        """Failed paths, by the peer that could not be read."""
        return dict(self._failed)

    def may_read(self, peer: Session, now: Instant) -> bool:
        return peer not in self._failed or self._failed[peer].until <= now

    def unreadable(self, now: Instant) -> list[Session]:
        return [peer for peer in self._failed if not self.may_read(peer, now)]

    def arrived(self, peer: Session) -> None:
        self._failed.pop(peer, None)

    def in_vain(self, peer: Session, now: Instant, fault: str = "") -> bool:
        """Count a failed hand-off. True: the path is not tried for a while from now on."""
        before = self._failed.get(peer)
        failures = 1 if before is None else before.failures + 1
        doublings = failures - FREE_FAILURES - 1
        until = now if doublings < 0 else Instant(now + SECONDS * 2 ** min(doublings, DOUBLINGS_MAX))
        self._failed[peer] = FailedPath(failures, until, fault or ("" if before is None else before.fault))
        return doublings >= 0

    def forget(self, peer: Session) -> None:
        """Forget a peer that is gone. An instance that joins in its place is another one."""
        self._failed.pop(peer, None)
