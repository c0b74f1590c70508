"""Is the worker alive? One life after the other, each with an epoch; every wait has a deadline.

STARTING --ready--> READY --lose--> STARTING (next epoch) ... after too many losses in a row: GONE
"""

from __future__ import annotations

from enum import Enum

from baton.config import SchedulerConfig
from baton.protocol.ids import Instant, WorkerEpoch


class WorkerState(Enum):
    STARTING = "starting"
    READY = "ready"
    GONE = "gone"


class WorkerWatch:
    __slots__ = ("_config", "deadline", "epoch", "losses", "state")

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.epoch = WorkerEpoch(1)
        self.state = WorkerState.STARTING
        self.losses = 0
        "In a row, without an absorbed step in between."
        self.deadline: Instant | None = None
        "By then the oldest plan has its result, or the new worker is ready. The first start is the start-up table's."

    @property
    def overdue(self) -> str:
        """What the deadline was for."""
        waited = "no result of a step" if self.state is WorkerState.READY else "not ready"
        return f"{waited} in time"

    def ready(self, epoch: WorkerEpoch) -> bool:
        if self.state is WorkerState.GONE and epoch >= self.epoch:
            self.epoch, self.losses = epoch, 0  # somebody has mended it, and counts on from what he knew
        elif epoch != self.epoch or self.state is WorkerState.READY:
            return False
        self.state = WorkerState.READY
        self.deadline = None
        return True

    def lose(self, now: Instant) -> bool:
        """This life is over. True if another one is to be started."""
        self.losses += 1
        self.epoch = WorkerEpoch(self.epoch + 1)
        if self.losses > self._config.worker_restarts_max:
            self.state = WorkerState.GONE
            self.deadline = None
            return False
        self.state = WorkerState.STARTING
        self.deadline = Instant(now + self._config.worker_start_seconds_max)
        return True

    def step_planned(self, now: Instant) -> None:
        if self.deadline is None:
            self.deadline = Instant(now + self._config.step_seconds_max)

    def step_absorbed(self, now: Instant, more_in_flight: bool) -> None:
        """The worker answers: the next plan's time runs from now, because it could not begin before."""
        self.losses = 0
        self.deadline = Instant(now + self._config.step_seconds_max) if more_in_flight else None
