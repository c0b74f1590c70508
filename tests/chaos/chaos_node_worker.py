"""The worker of an instance, disturbed: it waits at a gate before it takes a plan (chaos_gates.py), and may be slow."""

from __future__ import annotations

import os
import random
import time

from chaos_gates import ORDERS, Gate
from chaos_worker import run_all_drafts

from baton.protocol.codec import Message
from baton.protocol.step import StepPlan, StepResult
from baton.runtime.wire.channel import BlockingChannel
from baton.runtime.worker import process as worker


class ChaosChannel(BlockingChannel):
    def __init__(self, sock: object) -> None:
        super().__init__(sock)  # type: ignore[arg-type]
        seed, self._delay = ORDERS.get("delay", (0, 0.0))
        self._random = random.Random(f"{seed} {os.getpid()}")
        self._gate = Gate("plan")

    def send(self, message: Message) -> None:
        if type(message) is StepResult and self._delay:
            time.sleep(self._random.random() * self._delay)
        super().send(message)

    def receive(self) -> Message | None:
        message = super().receive()
        if type(message) is StepPlan:
            self._gate.wait()
        return message


if __name__ == "__main__":
    if ORDERS.get("all_drafts"):
        run_all_drafts()
    worker.BlockingChannel = ChaosChannel  # type: ignore[misc]
    worker.main()
