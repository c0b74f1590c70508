"""The worker, disturbed: the real one behind a channel that waits, stalls or breaks where it is told to.

What to do is JSON in $BATON_CHAOS, which only this file reads. All keys are optional:

gate          {"at": "start" | "loading" | "plan", "folder": f}: touch f/reached there, go on when f/open exists
delay         [seed, seconds]: each result is held back for up to that long
dies_on_token every life of the worker exits when it is given a sequence with this token
dies_from     lives from this epoch on exit before they are ready
all_drafts    drafts run whatever they cost: what a test sees does not depend on the clock
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from baton.config import WorkerConfig
from baton.protocol.codec import Message
from baton.protocol.control import LoadProgress
from baton.protocol.step import StepPlan, StepResult
from baton.runtime.wire.channel import BlockingChannel
from baton.runtime.worker import process as worker

ORDERS = json.loads(os.environ.get("BATON_CHAOS", "{}"))
EXIT_STATUS = 86


class ChaosChannel(BlockingChannel):
    def __init__(self, sock) -> None:
        super().__init__(sock)
        seed, self._delay = ORDERS.get("delay", (0, 0.0))
        self._random = random.Random(f"{seed} {os.getpid()}")
        self._sent: float = 0.0

    def send(self, message: Message) -> None:
        if type(message) is LoadProgress:
            gate("loading")
        elif type(message) is StepResult and self._delay:
            time.sleep(self._random.random() * self._delay)
        super().send(message)

    def receive(self) -> Message | None:
        message = super().receive()
        if type(message) is StepPlan:
            gate("plan")
            if any(ORDERS.get("dies_on_token") in new.tokens for new in message.new):
                os._exit(EXIT_STATUS)
        return message


def gate(place: str) -> None:
    order = ORDERS.get("gate")
    if order is None or order["at"] != place:
        return
    folder = Path(order["folder"])
    parent = os.getppid()
    (folder / "reached").touch()
    while not (folder / "open").exists() and os.getppid() == parent:  # at the start nothing ties it to its parent yet
        time.sleep(0.01)


def run_all_drafts() -> None:
    from baton.worker.drafters.price import DraftPrice  # imports numpy
    from baton.worker.drafters.priced_model import PricedModel

    priced = PricedModel.__init__
    PricedModel.__init__ = lambda self, drafter, price: priced(self, drafter, None)  # type: ignore[method-assign]
    DraftPrice.choose = lambda self, sequences, drafts, **_: dict(drafts)  # type: ignore[method-assign]


def main() -> None:
    gate("start")
    if ORDERS.get("all_drafts"):
        run_all_drafts()
    begin = worker.begin_child

    def disturbed(settings_type: type[WorkerConfig]):
        config, sockets = begin(settings_type)
        if config.epoch >= ORDERS.get("dies_from", sys.maxsize):
            os._exit(EXIT_STATUS)
        return config, sockets

    worker.begin_child = disturbed
    worker.BlockingChannel = ChaosChannel
    worker.main()


if __name__ == "__main__":
    main()
