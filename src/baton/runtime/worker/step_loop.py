"""The worker's loop: plans in, results out, in order.

                 plan N+1            result N
    engine  -----------------> loop -----------> engine
                               |  ^
              launch N+1       |  | eventfd: step N is done
                               v  |
                              device -- waiter thread

As many plans are submitted as the runner may have under way. With one (a CPU) a plan is computed on arrival. With more (a GPU)
the loop waits for the channel and for the oldest step at once. A plan that needs the tokens of the step before is launched
before that result is sent: the device is idle until then. The result is sent earlier if the launch waits for something else
(a mask), and also if the launch fails: the engine looks for the cause in the oldest plan without a result.

Only a thread that waits for the device learns that a step is done, so there is one: it waits, writes to the eventfd, and shares
nothing else with the loop.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Final

from baton.protocol.codec import Message
from baton.protocol.control import Ping, Pong
from baton.protocol.progress import ProgressWord
from baton.protocol.step import StepPlan, digest_of
from baton.runtime.wire.channel import BlockingChannel

if TYPE_CHECKING:  # numpy is imported with the model
    from baton.worker.in_flight_step import InFlightStep
    from baton.worker.model_runner import ModelRunner

END_SECONDS_MAX: Final = 5.0
"""Seconds that the end waits for a running step. A device that hangs is left to the kernel."""


class StepLoop:
    def __init__(self, runner: ModelRunner, channel: BlockingChannel, progress: ProgressWord, rank: int = 0) -> None:
        """`rank`: every rank of a worker set computes the result, rank 0 sends it and the others its digest."""
        self._runner = runner
        self._channel = channel
        self._progress = progress
        self._rank = rank
        self._in_flight: deque[InFlightStep] = deque()
        self._finished: InFlightStep | None = None
        "The step whose tokens the next launch waited for, until its result is sent."
        self._waiter: Waiter | None = None
        "None: a plan is computed on arrival."
        runner.call_before_waits(self._send_finished)

    def run(self) -> None:
        """Run until the engine closes the channel."""
        if self._runner.steps_ahead == 1:
            while (message := self._channel.receive()) is not None:
                self._on_message(message)
                self._finish_all()
            return
        with Waiter() as self._waiter:
            while (message := self._next(self._waiter)) is not None:
                self._on_message(message)

    def _on_message(self, message: Message) -> None:
        if type(message) is StepPlan:
            if self._runner.must_wait(message):
                self._wait_for_tokens(message)
            try:
                in_flight = self._runner.submit(message)
                self._in_flight.append(in_flight)
                if self._waiter is not None:
                    self._waiter.watch(in_flight)
            finally:
                self._send_finished()
        elif type(message) is Ping:
            self._channel.send(Pong(message.number))

    def _next(self, waiter: Waiter) -> Message | None:
        """The next message, None at the end. Results of finished steps are sent meanwhile."""
        while self._in_flight:
            full = len(self._in_flight) >= self._runner.steps_ahead
            if not full and self._channel.has_message:
                break
            ready = waiter.poll(None if full else self._channel.fileno())
            if waiter.fd in ready:
                self._finish()
            else:
                break
        return self._channel.receive()

    def _wait_for_tokens(self, plan: StepPlan) -> None:
        """Finish all steps before this plan. The result of the last one is not sent yet. Waits for the device itself: the
        waiter's thread would have to wake this one."""
        self._runner.apply(plan)
        while len(self._in_flight) > 1:
            self._finish()
        in_flight = self._in_flight.popleft()
        self._runner.finish(in_flight)
        self._finished = in_flight

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish()

    def _finish(self) -> None:
        """Finish the oldest step and send its result."""
        self._take_one()
        in_flight = self._in_flight.popleft()
        self._runner.finish(in_flight)
        self._send(in_flight)

    def _send_finished(self) -> None:
        """Send the result of the step that `_wait_for_tokens` has finished, unless it is sent."""
        if (in_flight := self._finished) is not None:
            self._finished = None
            self._take_one()
            self._send(in_flight)

    def _take_one(self) -> None:
        if self._waiter is not None:
            self._waiter.take_one()

    def _send(self, in_flight: InFlightStep) -> None:
        result = in_flight.result()
        self._channel.send(digest_of(result) if self._rank else result)
        self._progress.advance()


class Waiter:
    """Thread that waits for one step after the other, and counts finished ones in an eventfd."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._queue: SimpleQueue[InFlightStep | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="step waiter", daemon=True)
        self._thread.start()

    def watch(self, in_flight: InFlightStep) -> None:
        self._queue.put(in_flight)

    def poll(self, other: int | None) -> list[int]:
        """Wait until a step is done, or `other` is readable; return the ready descriptors."""
        poller = select.poll()  # select() itself knows only descriptors below 1024
        poller.register(self.fd, select.POLLIN)
        if other is not None:
            poller.register(other, select.POLLIN)
        return [fd for fd, _ in poller.poll()]

    def take_one(self) -> None:
        """Take one finished step: decrement the count; block until it is positive."""
        os.eventfd_read(self.fd)

    def __enter__(self) -> Waiter:
        return self

    def __exit__(self, *error: object) -> None:
        self._queue.put(None)
        self._thread.join(END_SECONDS_MAX)
        if not self._thread.is_alive():
            os.close(self.fd)

    def _run(self) -> None:
        while (in_flight := self._queue.get()) is not None:
            with contextlib.suppress(Exception):  # collecting the step raises the same error
                in_flight.wait()
            os.eventfd_write(self.fd, 1)
