"""A log line when requests are preempted: they are slower than others, and more memory would help."""

from __future__ import annotations

import logging
from typing import Final

from baton.core.instance import Instance
from baton.repeats import Repeats, printable

logger = logging.getLogger("baton.engine")

LOG_SECONDS: Final = 10.0
NAMES_MAX: Final = 3


class PreemptionLog:
    """Looked at after every event whose count of preemptions differs from `seen`."""

    __slots__ = ("_logged", "_repeats", "seen")

    def __init__(self) -> None:
        self.seen = 0
        "Preemptions of the instance, as last looked at."
        self._logged = 0
        "As last logged."
        self._repeats = Repeats(LOG_SECONDS)

    def look(self, instance: Instance, now: float) -> None:
        count = instance.stats.preemptions
        if count == self.seen:
            return
        self.seen = count
        if not self._repeats.due("preempted", now):
            return
        new, self._logged = count - self._logged, count
        board, pool = instance.board, instance.board.cache.pool
        names = ", ".join(printable(name) for name in instance.view.preempted_requests(NAMES_MAX))
        logger.warning(
            "%d sequences preempted (%d in all), for want of KV blocks: %d of %d free or idle, %d sequences run, %d wait; "
            "requests: %s",
            new,
            count,
            pool.free + pool.idle,
            pool.total,
            len(board.running),
            len(board.waiting),
            names or "running again",
        )
