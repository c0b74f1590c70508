"""A worker without a model: token k of a sequence is (7 * length + index) % 50. Its model's name is its orders, as JSON:

stalls_at    stands still at this plan      garbage_at    sends bytes that are no frame at this plan
in_epochs    only in these lives            hello         what to change in its greeting
identities   of what it has loaded, by life
"""

from __future__ import annotations

import json
import os
import time

from baton.config import WorkerConfig
from baton.protocol.control import Ping, Pong, WorkerHello
from baton.protocol.ids import WorkerEpoch
from baton.protocol.step import PREEMPTED_TOKEN_ID, StepPlan, StepResult
from baton.runtime.channel import BlockingChannel
from baton.runtime.children import begin_child
from baton.runtime.process_table import CONTROL


def expected(prompt: int, count: int, index: int = 0) -> list[int]:
    return [(7 * (prompt + k) + index) % 50 for k in range(count)]


class Runner:
    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.who: dict[int, tuple[int, int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        rows = []
        for new in plan.new:
            self.known[new.slot], self.computed[new.slot] = len(new.tokens), new.computed_tokens
            self.who[new.slot] = new.incarnation, new.index
        for slot, count in zip(plan.run.slots, plan.run.counts, strict=True):
            self.computed[slot] += count
            if self.computed[slot] < self.known[slot]:
                rows.append((slot, self.who[slot][0], ()))
            else:
                rows.append((slot, self.who[slot][0], ((7 * self.known[slot] + self.who[slot][1]) % 50,)))
                self.known[slot] += 1
        rows += [(slot, incarnation, (PREEMPTED_TOKEN_ID,)) for slot, incarnation in plan.drops]
        return StepResult.of(plan.step, plan.epoch, rows)


def main() -> None:
    config, sockets = begin_child(WorkerConfig)
    sock = sockets[CONTROL]
    orders = json.loads(config.model)
    if config.epoch not in orders.get("in_epochs", [config.epoch]):
        orders = {}
    channel, runner, plans = BlockingChannel(sock), Runner(), 0
    hello = {"blocks": config.blocks or 64, "block_size": config.block_size, "vocab_size": 50, "context_tokens": 512}
    names = json.loads(config.model).get("identities", [""])
    hello["identity"] = names[min(config.epoch, len(names)) - 1].encode()
    channel.send(WorkerHello(epoch=WorkerEpoch(config.epoch), **{**hello, **orders.get("hello", {})}))
    while (message := channel.receive()) is not None:
        if type(message) is Ping:
            channel.send(Pong(message.number))
        elif type(message) is StepPlan:
            plans += 1
            if plans == orders.get("stalls_at"):
                time.sleep(600)
            if plans == orders.get("garbage_at"):
                os.write(sock.fileno(), b"\x00garbage\x00" * 4)
            channel.send(runner.execute(message))


if __name__ == "__main__":
    main()
