"""A worker without a model: token k of a sequence is (7 * length + index) % 50. Its model's name is its orders, as JSON:

stalls_at    stands still at this plan      garbage_at    sends bytes that are no frame at this plan
in_epochs    only in these lives            hello         what to change in its greeting
works_at      at this plan, works until a file named `done` exists: its word advances
wordless      has no progress word
identities   of what it has loaded, by life
rank_orders  further orders of single ranks, by rank; ranks wait for each other in every step
another_at   at this plan, computes something else than the other ranks
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from baton.config import WorkerConfig
from baton.protocol.control import Ping, Pong, ProgressShared, WorkerHello
from baton.protocol.ids import WorkerEpoch
from baton.protocol.progress import ProgressWord
from baton.protocol.step import PREEMPTED_TOKEN_ID, StepPlan, StepResult, digest_of
from baton.runtime.processes.children import begin_child
from baton.runtime.processes.process_table import CONTROL, DESCRIPTORS
from baton.runtime.wire.channel import BlockingChannel
from baton.runtime.wire.descriptors import send_descriptor
from baton.runtime.worker.process import WorkerPool, shared_by_ranks

LAYOUT_FIELDS: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 4, "dtype": "float32"}
POOLS: list[Any] = []
"""They live as long as the process."""


def gate(orders: dict[str, Any], place: str) -> None:
    order = orders.get("gate")
    if order is None or order["at"] != place:
        return
    folder, parent = Path(order["folder"]), os.getppid()
    (folder / "reached").touch()
    while not (folder / "open").exists() and os.getppid() == parent:
        time.sleep(0.01)


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


def come_to_pool(config: WorkerConfig, channel: BlockingChannel, link: socket.socket) -> dict[str, int]:
    """What its greeting says about it."""
    if config.pool == "private":
        return {"blocks": config.blocks or 64}
    from baton.kvpool.layout import KVLayout  # numpy, for those who need it
    from baton.worker.platforms.cpu import CpuPlatform

    layout = KVLayout(**LAYOUT_FIELDS, block_size=config.block_size)
    pool = WorkerPool(config, channel, link)(CpuPlatform(), layout, config.blocks or 64)
    POOLS.append(pool)
    return {"blocks": pool.blocks, "pool": pool.incarnation, "block_bytes": layout.block_bytes}


class Barrier:
    """A collective without sums: a rank leaves step N when all ranks have come to it."""

    def __init__(self, config: WorkerConfig, link: socket.socket) -> None:
        self._rank, self._ranks = config.rank, config.ranks
        fd = shared_by_ranks(config, link)
        os.ftruncate(fd, mmap.PAGESIZE)
        self._steps = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")

    def wait(self, step: int) -> None:
        self._steps[self._rank], parent = step, os.getppid()
        while any(self._steps[rank] < step for rank in range(self._ranks)) and os.getppid() == parent:
            time.sleep(0.001)


def main() -> None:
    config, sockets = begin_child(WorkerConfig)
    sock = sockets[CONTROL]
    orders = json.loads(config.model)
    orders |= orders.get("rank_orders", {}).get(str(config.rank), {})
    if config.epoch not in orders.get("in_epochs", [config.epoch]):
        orders = {}
    gate(orders, "start")
    channel, runner, plans = BlockingChannel(sock), Runner(), 0
    word = ProgressWord.create()
    if not orders.get("wordless"):
        send_descriptor(sockets[DESCRIPTORS], ProgressShared(WorkerEpoch(config.epoch)), word.fd)
    barrier = Barrier(config, sockets[DESCRIPTORS]) if config.ranks > 1 else None
    pool = come_to_pool(config, channel, sockets[DESCRIPTORS])
    gate(orders, "hello")
    hello = {**pool, "block_size": config.block_size, "vocab_size": 50, "context_tokens": 512, "layout": b"fake"}
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
            while plans == orders.get("works_at") and not os.path.exists(orders["done"]):
                word.advance()
                time.sleep(0.005)
            if plans == orders.get("garbage_at"):
                os.write(sock.fileno(), b"\x00garbage\x00" * 4)
            if barrier is not None:
                word.advance()
                barrier.wait(plans)
            result = runner.execute(message)
            if plans == orders.get("another_at"):
                result = msgspec.structs.replace(result, values=tuple(value + 1 for value in result.values))
            channel.send(digest_of(result) if config.rank else result)
            word.advance()


if __name__ == "__main__":
    main()
