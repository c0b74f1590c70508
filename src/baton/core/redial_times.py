"""When an instance dials a router again.

session lost, router silent    soon, and then less and less often
refused                        slowly: the router will not change its mind
refused for its name           when the router says: the session that has the name may be that of our earlier life, whose
                               machine was cut off; if it is still taken then, that one lives, and a person has to act
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from random import Random

RETRY_SECONDS: Final = 0.1
RETRY_SECONDS_MAX: Final = 5.0
REFUSED_SECONDS: Final = 10.0
STEADY_SECONDS: Final = 5.0
"""After a session of this length the next dial is quick again."""
HINTED_DIALS: Final = 2
"""Number of refusals in a row after which the router's time counts. One is not enough after a stall of the router."""


class DialOutcome(NamedTuple):
    why: str
    open_seconds: float = 0.0
    "How long the session was open."
    refused: bool = False
    retry_seconds: float = 0.0
    "InstanceRefused.retry_seconds."


class RedialTimes:
    """The delays before dials of one router, with jitter."""

    __slots__ = ("_delay", "_hinted", "_rng", "refused")

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._delay = RETRY_SECONDS
        self._hinted = 0
        self.refused = False
        "The router's last decision was a refusal."

    def after(self, end: DialOutcome) -> float:
        """Seconds until the next dial."""
        self._delay = RETRY_SECONDS if end.open_seconds >= STEADY_SECONDS else min(2 * self._delay, RETRY_SECONDS_MAX)
        if end.open_seconds > 0.0:
            self.refused, self._hinted = False, 0
        self.refused = self.refused or end.refused
        if 0.0 < end.retry_seconds < REFUSED_SECONDS and self._hinted < HINTED_DIALS:
            self._hinted += 1
            return max(end.retry_seconds, RETRY_SECONDS) * self._rng.uniform(1.0, 1.2)
        return (REFUSED_SECONDS if self.refused else self._delay) * self._rng.uniform(0.5, 1.0)
