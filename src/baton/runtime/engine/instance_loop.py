"""The instance machine on the engine's loop: events in, effects to their ports, and checks after every event.

dispatch(event) --> Instance.handle --> effects, each to its port (driver.py)
               `-> is the worker lost for good? is the state of an idle instance consistent? what is reported? (reporting.py)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from baton.core.effects import Effect
from baton.core.engine.worker_watch import WorkerState
from baton.core.events import Event, Tick, WorkerLost
from baton.core.instance import Instance
from baton.errors import EngineError, InvariantBroken
from baton.runtime.driver import Driver

logger = logging.getLogger("baton.engine")

CHECK_SECONDS: Final = 10.0
"""Least seconds between two checks of an idle engine's state."""


class InstanceLoop:
    def __init__(self, on_over: Callable[[BaseException], None]) -> None:
        """`on_over`: called with the error after which the engine must end."""
        self.instance: Instance | None = None
        "The instance. None until the start has determined the number of blocks."
        self.after: Callable[[Event], None] = lambda event: None
        "Called after each event."
        self._on_over = on_over
        self._driver: Driver[Event, Effect] | None = None
        self._loop = asyncio.get_running_loop()
        self._check_due = 0.0

    @property
    def begun(self) -> bool:
        return self.instance is not None

    def begin(self, instance: Instance, ports: Mapping[type[Any], Callable[[Any], None]]) -> None:
        self.instance = instance
        self._driver = Driver(instance, ports, self._on_due)

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()

    def dispatch(self, event: Event) -> None:
        if self._driver is None or self.instance is None:
            return
        self._driver.dispatch(event)
        if self.instance.worker.state is WorkerState.GONE:  # its requests have their error; our parent may restart us
            text = f"the worker was lost {self.instance.worker.losses} time(s) in a row: the server ends"
            self._on_over(EngineError(f"{text} ({event.reason})" if isinstance(event, WorkerLost) else text))
        if not self.instance.board.groups and self.instance.idle:
            self._check_when_due(self.instance)
        self.after(event)

    def _on_due(self) -> None:
        self.dispatch_from_loop(Tick())

    def dispatch_from_loop(self, event: Event) -> None:
        """Dispatch from a callback of the loop, and report errors: asyncio would only log them."""
        try:
            self.dispatch(event)
        except Exception as error:
            self._on_over(error)

    def run_from_loop(self, act: Callable[[], None]) -> None:
        """Run a callback of the loop that may dispatch, and report errors: asyncio would only log them."""
        try:
            act()
        except Exception as error:
            self._on_over(error)

    def _check_when_due(self, instance: Instance) -> None:
        """Verify, while no client waits, that nothing leaked. An engine with an impossible state must end."""
        if self._loop.time() >= self._check_due:
            self._check_due = self._loop.time() + CHECK_SECONDS
            try:
                instance.check_part()
            except InvariantBroken as broken:
                logger.error("the engine found its own state impossible: %s", broken)
                self._on_over(broken)
