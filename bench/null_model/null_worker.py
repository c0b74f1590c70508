"""The worker process as it is, with the null runner where the model would be built, and a clock on its channel."""

from __future__ import annotations

import signal
import sys
from time import perf_counter
from types import ModuleType, SimpleNamespace
from typing import Any

from null_runner import NullRunner, build_null

from baton.config import WorkerConfig
from baton.protocol.codec import Message
from baton.protocol.step import StepPlan
from baton.runtime.wire.channel import BlockingChannel
from baton.runtime.worker import process as worker

RUNNERS: list[NullRunner] = []


class TimedChannel(BlockingChannel):
    """From "the last result is sent" to "the next plan is here"."""

    def receive(self) -> Message | None:
        asked = perf_counter()
        message = super().receive()
        if type(message) is StepPlan:
            RUNNERS[0].notes.asked.append(asked)
            RUNNERS[0].notes.got.append(perf_counter())
        return message


def build_worker(config: WorkerConfig, *_: Any, **__: Any) -> SimpleNamespace:
    built = build_null(config)
    RUNNERS.append(built.runner)
    return built


def main() -> None:
    stand_in: Any = ModuleType("baton.worker.build")  # so that the real one, and torch with it, is not even imported
    stand_in.build_worker = build_worker
    sys.modules["baton.worker.build"] = stand_in
    worker.BlockingChannel = TimedChannel  # type: ignore[misc]
    # An engine that ends kills its worker, so notes are asked for before.
    signal.signal(signal.SIGUSR1, lambda number, frame: RUNNERS[0].notes.save())
    worker.main()


if __name__ == "__main__":
    main()
