"""`baton serve`: starts its children (process_table.py), passes on their reports, and ends everything in order.

A child's death is seen at once, and logged. A child whose event loop hangs is killed (silence_watch.py). An engine that was
killed (by any signal) while the server was ready is restarted: the front gets the socket of the new one, and replays all open
requests there. The same holds for an engine whose worker was killed during its start. After any other end, and after too many
in a row, everything else is ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from baton.config import ServeConfig
from baton.protocol.codec import Message
from baton.protocol.control import InstanceReady, LoadProgress, ModelChanged
from baton.runtime.processes.child import Child, Loss
from baton.runtime.processes.process_group import ProcessGroup
from baton.runtime.processes.process_table import SUPERVISOR_CHILDREN


class Supervisor(ProcessGroup[ServeConfig]):
    rows = SUPERVISOR_CHILDREN
    "The supervisor of `baton serve`. Tests replace some rows with faulty programs."

    def __init__(
        self,
        config: ServeConfig,
        on_progress: Callable[[LoadProgress], None] = lambda progress: None,
        on_ready: Callable[[InstanceReady], None] = lambda ready: None,
        on_stopping: Callable[[], None] = lambda: None,
        on_restart: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._on_stopping = on_stopping
        self._on_restart = on_restart
        self._ready: dict[str, None] = {}
        "Names of children that have been ready."
        scheduler = config.engine().instance.scheduler
        super().__init__(
            self.rows,
            lambda: self._config,
            start_seconds_max=config.start_seconds_max,
            restarts_max=scheduler.worker_restarts_max,
            backoff_seconds_max=scheduler.restart_backoff_seconds_max,
        )

    def on_message(self, child: Child, message: Message) -> None:
        if type(message) is LoadProgress:
            self._on_progress(message)
        elif type(message) is ModelChanged:  # another engine begins with these weights
            self._config = replace(self._config, model=message.model)
        elif type(message) is InstanceReady:
            child.mark_ready()
            self._ready[child.name] = None
            if len(self._ready) == len(self.rows) and self.start_is_over():
                self._on_ready(message)

    def on_lost(self, child: Child, loss: Loss) -> None:
        self._on_restart(loss.text)

    def on_stopping(self) -> None:
        self._on_stopping()
