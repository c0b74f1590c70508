"""An instance that is told to end, and its routers: it takes nothing new and says so, hand-offs and streams may finish.

told to end --> DRAINING: mode and beats say so --> nothing is open, or drain_seconds_max is over --> PAUSED --> it ends
                                                    (what is left is ended, and routers replay it elsewhere)

Without a session there is nobody to drain for: what was asked for in it has ended with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final, Protocol

from baton.core.effects import Mode
from baton.core.events import Event, Pause

logger = logging.getLogger("baton.engine")

PAUSED_SECONDS: Final = 2.0
"""After the drain's deadline the worker answers the last drops in this time."""


class Told(Protocol):
    def dispatch(self, event: Event) -> None: ...


class Leaving:
    def __init__(self) -> None:
        self.begun = False
        self._over = asyncio.Event()

    def on_mode(self, mode: Mode) -> None:
        self._over.set() if mode is Mode.PAUSED else self._over.clear()

    def on_alone(self) -> None:
        """No session is open any more."""
        if self.begun:
            self._over.set()

    async def drained(self, engine: Told, seconds: float) -> None:
        """Whoever comes second waits for the first one's drain."""
        if not self.begun:
            self.begun = True
            logger.info("draining: requests of routers may run for %g s", seconds)
            engine.dispatch(Pause(seconds))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds + PAUSED_SECONDS)
