"""The state of the worker, one life after the other, each with an epoch. Every wait has a deadline.

STARTING --ready--> READY --lose--> STARTING (next epoch) ... after too many losses in a row: GONE

A life is healthy once HEALTHY_STEPS of its steps were absorbed; losses count in a row until then, and each restart in a row
waits longer. A loss that is not the worker's fault (killed from outside, a poisonous request being isolated) does not count
towards GONE, only towards the backoff.

Repeated kills from outside count as the worker's fault after all: the kernel does not always report that it killed for lack of
memory, and a request that needs too much would be replayed for ever. So kills count from the sixth on within a minute
(`worker_kills_max`, `worker_kill_seconds`) in which workers were ready: loading time does not count.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from baton.config import SchedulerConfig
from baton.core.restarts import Restarts
from baton.protocol.ids import Instant, WorkerEpoch

HEALTHY_STEPS: Final = 16
LONGEST_STEPS: Final = 20
"""Factor on `step_seconds_max` for a step that shows progress."""


class WorkerState(Enum):
    STARTING = "starting"
    READY = "ready"
    GONE = "gone"
    ASLEEP = "asleep"
    "Asleep: no worker is wanted (sleeping.py)."


class WorkerWatch:
    __slots__ = (
        "_begun",
        "_config",
        "_kills",
        "_ready_at",
        "_restarts",
        "_served",
        "_steps",
        "deadline",
        "epoch",
        "state",
    )

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.epoch = WorkerEpoch(1)
        self.state = WorkerState.STARTING
        self._restarts = Restarts(config.worker_restarts_max, config.restart_backoff_seconds_max)
        self._served = 0.0
        "Seconds for which earlier lives were ready."
        self._kills: list[float] = []
        "Times of recent kills from outside, in seconds of service."
        self._ready_at: Instant | None = None
        "Time when the present life became ready."
        self._steps = 0
        "Number of steps absorbed in this life."
        self._begun = Instant(0.0)
        "Time from which the limit of the oldest plan counts."
        self.deadline: Instant | None = None
        "Deadline for the result of the oldest plan, or for the new worker. The start-up table limits the first start."

    @property
    def losses(self) -> int:
        return self._restarts.losses

    @property
    def overdue(self) -> str:
        """The reason for the log when the deadline passes."""
        waited = "no result of a step" if self.state is WorkerState.READY else "not ready"
        return f"{waited} in time"

    def ready(self, epoch: WorkerEpoch, now: Instant) -> bool:
        if self.state is WorkerState.GONE and epoch >= self.epoch:
            self.epoch = epoch  # an operator has started another worker by hand
            self._restarts.clear()
            self._kills.clear()
        elif epoch != self.epoch or self.state is WorkerState.READY:
            return False
        self.state = WorkerState.READY
        self.deadline = None
        self._steps = 0
        self._ready_at = now
        return True

    def killed(self, now: Instant) -> bool:
        """Record a kill from outside. True: there were too many in a row, so it counts as a fault of the computation."""
        config, served = self._config, self._service_seconds(now)
        self._kills = [at for at in self._kills if served - at <= config.worker_kill_seconds][-config.worker_kills_max :]
        self._kills.append(served)
        return len(self._kills) > config.worker_kills_max

    def _service_seconds(self, now: Instant) -> float:
        return self._served + (0.0 if self._ready_at is None else now - self._ready_at)

    def lose(self, now: Instant, *, counts: bool) -> float | None:
        """End this life. Returns the seconds to wait before the next one begins; None: there is no next one."""
        self.epoch = WorkerEpoch(self.epoch + 1)
        self._served, self._ready_at = self._service_seconds(now), None
        delay = self._restarts.next_delay(counts=counts)
        if delay is None:
            self.state = WorkerState.GONE
            self.deadline = None
            return None
        self.state = WorkerState.STARTING
        self.deadline = Instant(now + delay + self._config.worker_start_seconds_max)
        return delay

    def sleep(self) -> None:
        """Stop by order, without a fault. Later messages of the present worker belong to an ended epoch."""
        self.epoch = WorkerEpoch(self.epoch + 1)
        self.state = WorkerState.ASLEEP
        self.deadline = None
        self._ready_at = None  # the life's time of service is not counted

    def wake(self, now: Instant) -> None:
        self.state = WorkerState.STARTING
        self.deadline = Instant(now + self._config.worker_start_seconds_max)

    def step_planned(self, now: Instant) -> None:
        if self.deadline is None:
            self._begin_step(now)

    def progressed(self, now: Instant) -> None:
        """Extend the deadline: the worker computes, if slowly. A large step of a large model on few cores takes minutes."""
        if self.state is WorkerState.READY and self.deadline is not None:
            seconds = self._config.step_seconds_max
            self.deadline = Instant(min(now + seconds, self._begun + LONGEST_STEPS * seconds))

    def step_absorbed(self, now: Instant, more_in_flight: bool) -> None:
        """Record a result: the next plan's time runs from now, because it could not begin before."""
        self._steps += 1
        if self._steps == HEALTHY_STEPS:
            self._restarts.clear()
        self.deadline = None
        if more_in_flight:
            self._begin_step(now)

    def _begin_step(self, now: Instant) -> None:
        self._begun = now
        self.deadline = Instant(now + self._config.step_seconds_max)
