"""What came of pulls: counted by transport and outcome, and the reason of a failed one in the log.

copied        all blocks arrived
unreachable   no connection was made, or one side did not prove itself
refused       the peer does not let us read that pool, or it has another layout
lost          the connection ended while blocks were read
late          the time was up
detached      our own pool was another one by then
device        the driver of a GPU failed

Nobody's request fails because of a pull: what is not copied is computed. So nobody but the operator would notice.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from baton.repeats import Repeats, printable

logger = logging.getLogger("baton.cache")

COPIED: Final = "copied"
DETACHED: Final = "detached"


class Pulls:
    """The counters are of one life of the cache service; the engine adds its lives up (runtime/engine/cache_keeper.py)."""

    def __init__(self) -> None:
        self._repeats = Repeats()
        self.outcomes: Counter[str] = Counter()
        "By transport and outcome, as `tcp/copied`."
        self.nbytes: Counter[str] = Counter()
        self.microseconds: Counter[str] = Counter()
        "Both by transport."

    def ended(self, transport: str, outcome: str, nbytes: int, seconds: float) -> None:
        self.outcomes[f"{transport}/{outcome}"] += 1
        if nbytes:
            self.nbytes[transport] += nbytes
            self.microseconds[transport] += round(1e6 * seconds)

    def log_failure(self, peer: str, transport: str, outcome: str, why: str, now: float) -> None:
        """Once a minute for the same peer and reason."""
        if outcome != DETACHED and (times := self._repeats.due((peer, outcome, why), now)):
            again = f" ({times} times)" if times > 1 else ""
            logger.warning(
                "KV blocks cannot be read from %s over %s: %s: %s%s", printable(peer), transport, outcome, printable(why), again
            )
