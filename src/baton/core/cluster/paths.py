"""Between which instances prompts really arrive. A role and an address say that one can read another; only a copy shows it.

    hand-offs in a row of which next to nothing came   1, 2: as before   3: not tried for 2 s   4: for 4 s ... 64 s
    one that came                                      begun anew

A prompt that is handed over in vain is computed twice. While a path is not tried, decode computes prompts itself at once (and
looks on the shared storage tier first, where there is one). After that time one hand-off shows whether it works again.
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
    "Hand-offs in vain in a row."
    until: Instant
    "The next one is not tried before."
    fault: str
    "Why the last copy failed, as its reader says. Empty: it does not say."


class Paths:
    """Of one instance: whom it could not read from. At most one entry for each that is there (`forget`)."""

    __slots__ = ("_failed",)

    def __init__(self) -> None:
        self._failed: dict[Session, FailedPath] = {}

    def __len__(self) -> int:
        return len(self._failed)

    def failed(self) -> dict[Session, FailedPath]:
        """By whom it could not read from."""
        return dict(self._failed)

    def may_read(self, peer: Session, now: Instant) -> bool:
        return peer not in self._failed or self._failed[peer].until <= now

    def unreadable(self, now: Instant) -> list[Session]:
        return [peer for peer in self._failed if not self.may_read(peer, now)]

    def came(self, peer: Session) -> None:
        self._failed.pop(peer, None)

    def in_vain(self, peer: Session, now: Instant, fault: str = "") -> bool:
        """Is the path given up for a while?"""
        before = self._failed.get(peer)
        failures = 1 if before is None else before.failures + 1
        doublings = failures - FREE_FAILURES - 1
        until = now if doublings < 0 else Instant(now + SECONDS * 2 ** min(doublings, DOUBLINGS_MAX))
        self._failed[peer] = FailedPath(failures, until, fault or ("" if before is None else before.fault))
        return doublings >= 0

    def forget(self, peer: Session) -> None:
        """It is gone. Whoever comes in its place is another one."""
        self._failed.pop(peer, None)
