"""An instance that is stopped, and its routers: it accepts no new requests and reports that, hand-offs and streams may finish.

stopped --> DRAINING: mode and heartbeats report it --> nothing is open, or drain_seconds_max has passed --> PAUSED --> it ends
                                                        (open requests are ended, and routers replay them elsewhere)

Without a session there is nothing to drain: requests of a session end with it.
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
"""Seconds after the drain's deadline in which the worker acknowledges the last drops."""


class DrainedEngine(Protocol):
    def dispatch(self, event: Event) -> None: ...


class Leaving:
    def __init__(self) -> None:
        self.begun = False
        self._draining = False
        self._over = asyncio.Event()

    def on_mode(self, mode: Mode) -> None:
        self._draining = mode is Mode.DRAINING
        self._over.set() if mode is Mode.PAUSED else self._over.clear()

    def on_alone(self) -> None:
        """Record that the last session has ended."""
        if self.begun:
            self._over.set()

    async def drained(self, engine: DrainedEngine, seconds: float) -> None:
        """Drain once. A second caller waits for the same drain."""
        if not self.begun:
            self.begun = True
            logger.info("draining: requests of routers may run for %g s", seconds)
            # The front of a stopped instance orders the drain, and ends after it: its time covers an unfinished drain.
            engine.dispatch(Pause(0.0 if self._draining else seconds))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds + PAUSED_SECONDS)
