"""Sleep and wake: a paused instance stops its worker, which frees weights and cache; later another worker is started.

    READY --sleep--> ASLEEP (the shell stops the worker, dispatches WorkerStopped) --wake--> STARTING --WorkerReady--> READY

Every order is answered by its number. A wake while the worker is still being stopped waits for the stop. Orders wait for the
stop at most `worker_stop_seconds_max`; then they are refused, and the instance stays asleep until the stop is reported.
"""

from __future__ import annotations

from baton.config import SchedulerConfig
from baton.core.effects import Effect, RestartWorker, StopWorker
from baton.core.engine.worker_watch import WorkerState, WorkerWatch
from baton.core.events import Sleep, Wake
from baton.errors import InvariantBroken
from baton.protocol.control import OrderAnswer, OrderOutcome
from baton.protocol.ids import Instant


class Sleeping:
    __slots__ = ("_orders_max", "_sleeps", "_stop_seconds_max", "_stopping", "_wakes", "_worker", "deadline")

    def __init__(self, config: SchedulerConfig, worker: WorkerWatch) -> None:
        self._worker = worker
        self._orders_max = config.sleep_orders_max
        self._stop_seconds_max = config.worker_stop_seconds_max
        self.deadline: Instant | None = None
        "Deadline for the worker to stop. After it the waiting orders are refused."
        self._stopping = False
        "Whether the shell has not dispatched WorkerStopped yet."
        self._sleeps: list[int] = []
        self._wakes: list[int | None] = []

    @property
    def asleep(self) -> bool:
        return self._worker.state is WorkerState.ASLEEP

    def sleep(self, event: Sleep, now: Instant, *, paused: bool) -> list[Effect]:
        """Stop the worker. Refused unless the instance is paused, so no client waits for an answer."""
        may = self.asleep or (paused and self._worker.state is WorkerState.READY)
        if not may or self._wakes:
            return [OrderAnswer(event.number, "refused", "pause it first, and wait for a worker that is being started")]
        if self.asleep and not self._stopping:
            return [OrderAnswer(event.number, "done")]
        if len(self._sleeps) >= self._orders_max:
            return [OrderAnswer(event.number, "refused", f"{len(self._sleeps)} orders to sleep wait already")]
        self._sleeps.append(event.number)
        self._wait_for_stop(now)
        if self.asleep:
            return []
        self._worker.sleep()
        self._stopping = True
        return [StopWorker(self._worker.epoch)]

    def stopped(self, now: Instant) -> list[Effect]:
        """Answer the orders: the worker has exited, and its memory is free."""
        if not self._stopping:
            return []
        self._stopping, self.deadline = False, None
        return [*self._answer(self._sleeps, "done"), *(self._start(now) if self._wakes else [])]

    def _wait_for_stop(self, now: Instant) -> None:
        if self.deadline is None:
            self.deadline = Instant(now + self._stop_seconds_max)

    def expire(self, now: Instant) -> list[Effect]:
        """Refuse the orders: the worker has not stopped in time. No other is started, because the old one may still hold all of
        the memory."""
        if self.deadline is None or now < self.deadline:
            return []
        self.deadline = None
        detail, unasked = "the worker has not ended in time", None in self._wakes
        answers = [*self._answer(self._sleeps, "refused", detail), *self._answer(self._wakes, "refused", detail)]
        if unasked:
            self._wakes.append(None)  # no caller would repeat it
        return answers

    def wake(self, event: Wake, now: Instant) -> list[Effect]:
        if self._worker.state is WorkerState.READY:
            return self._answer([event.number], "done")
        if self._worker.state is WorkerState.GONE:
            return self._answer([event.number], "refused", "no worker can be started")
        if len(self._wakes) >= self._orders_max:
            return self._answer([event.number], "refused", f"{len(self._wakes)} orders to wake wait already")
        self._wakes.append(event.number)
        if self.asleep and not self._stopping:
            return self._start(now)
        if self._stopping:
            self._wait_for_stop(now)
        return []

    def ready(self) -> list[Effect]:
        return self._answer(self._wakes, "done")

    def gone(self) -> list[Effect]:
        return self._answer(self._wakes, "refused", "the worker was lost too often in a row")

    def _start(self, now: Instant) -> list[Effect]:
        self._worker.wake(now)
        return [RestartWorker(self._worker.epoch, "killed", "the instance is woken")]

    def check(self) -> None:
        if max(len(self._sleeps), len(self._wakes)) > self._orders_max:
            text = f"{len(self._sleeps)} orders to sleep and {len(self._wakes)} to wake wait"
            raise InvariantBroken(text, invariant=49)

    @staticmethod
    def _answer(orders: list[int] | list[int | None], outcome: OrderOutcome, detail: str = "") -> list[Effect]:
        answers: list[Effect] = [OrderAnswer(number, outcome, detail) for number in orders if number is not None]
        orders.clear()
        return answers
