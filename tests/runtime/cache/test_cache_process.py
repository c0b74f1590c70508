"""The cache service on this loop: what it confirms about pools, and what of the host tier it keeps.

With real processes: test_startup.py, test_messenger_processes.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from run_loop import finish

from baton.config import CacheConfig, TiersConfig, WorkerConfig
from baton.errors import InvalidConfig, ProtocolError
from baton.kvpool.layout import KVLayout
from baton.kvpool.memory import MemoryFacts
from baton.kvpool.pool import KVPool
from baton.protocol.control import CacheHello
from baton.protocol.ids import BlockId, HostBlockId, MoveId, PoolIncarnation
from baton.protocol.moves import BlockMove, MoveResult
from baton.protocol.pool import DetachPool, HostPoolReady, PoolAttached, PoolDetached
from baton.runtime.cache import process as module
from baton.runtime.cache.process import CacheProcess
from baton.runtime.wire.descriptors import send_descriptor, take_descriptor

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=4, block_size=4, dtype="float32")
TIERS = TiersConfig(kv_host_gib=1e-5)
BLOCKS = TIERS.host_blocks(LAYOUT.block_bytes)

T = TypeVar("T")


class Rig:
    """`async with`: a service, and what it has said. Afterwards no descriptor is open that was not before."""

    async def __aenter__(self) -> Rig:
        self._before = len(os.listdir("/proc/self/fd"))
        self.said: list[tuple[Any, bool]] = []
        "Messages, and whether it had a pool when it sent them."
        self.link, self.theirs = socket.socketpair()
        self.link.setblocking(False)
        self.theirs.setblocking(False)
        config = CacheConfig(tiers=TIERS, log_level="info", log_format="text")
        control: Any = SimpleNamespace(send=lambda message: self.said.append((message, self.process.pool is not None)))
        self.process = CacheProcess(config, control, self.theirs)
        self._pools: list[KVPool] = []
        return self

    async def __aexit__(self, *_: object) -> None:
        process = self.process
        process.detach()
        if process._transfer is not None:
            process._transfer.close()
        for pool in [*self._pools, *([process._host] if process._host is not None else [])]:
            pool.close()
        while (received := self.announced()) is not None:
            os.close(received[1])
        self.link.close()
        self.theirs.close()
        assert len(os.listdir("/proc/self/fd")) == self._before, "a descriptor was kept"

    def pool(self, layout: KVLayout = LAYOUT, blocks: int = 4) -> KVPool:
        self._pools.append(KVPool.create(layout, blocks, "baton-test"))
        return self._pools[-1]

    def attach(self, pool: KVPool) -> None:
        self.process.attach(pool.announcement(), os.dup(pool.fd))

    async def heard(self, kind: type[T], count: int = 1) -> T:
        """The last of so many of this kind."""
        async with asyncio.timeout(20):
            while len(found := [message for message, _ in self.said if type(message) is kind]) < count:
                await asyncio.sleep(0.001)
        return found[-1]

    def announced(self) -> tuple[Any, int] | None:
        try:
            return take_descriptor(self.link)
        except BlockingIOError:
            return None


def in_rig(work: Callable[[Rig], Any]) -> None:
    async def main() -> None:
        async with Rig() as rig:
            await work(rig)

    finish(main())


def test_a_pool_is_confirmed_when_it_is_mapped_and_never_one_that_is_not_the_announced_one():
    async def work(rig: Rig) -> None:
        pool, other = rig.pool(), rig.pool()
        fd = os.dup(pool.fd)
        with pytest.raises(ProtocolError, match="another KV pool"):
            rig.process.attach(other.announcement(), fd)
        os.close(fd)
        assert rig.said == []
        rig.attach(pool)
        assert rig.said == [(PoolAttached(pool.incarnation), True)]
        await rig.heard(CacheHello)

    in_rig(work)


def test_an_order_to_let_go_is_obeyed_before_it_is_confirmed_and_only_for_that_pool():
    """What is confirmed is given back to the system, or to another worker: nothing may still write to it."""

    async def work(rig: Rig) -> None:
        pool = rig.pool()
        rig.attach(pool)
        await rig.heard(CacheHello)
        rig.process.on_message(DetachPool(PoolIncarnation(pool.incarnation + 1)))  # one that it never had: nothing to unmap
        assert rig.said[-1] == (PoolDetached(PoolIncarnation(pool.incarnation + 1)), True)
        rig.process.on_message(DetachPool(pool.incarnation))
        assert rig.said[-1] == (PoolDetached(pool.incarnation), False)
        rig.process.on_message(BlockMove(MoveId(1), "store", (HostBlockId(0),), (BlockId(0),), pool.incarnation))
        assert (await rig.heard(MoveResult)).error == "another pool is attached"
        assert not rig.process._broken.done()

    in_rig(work)


def test_the_pool_of_the_next_worker_is_copied_from():
    async def work(rig: Rig) -> None:
        first, second = rig.pool(), rig.pool()
        rig.attach(first)
        await rig.heard(CacheHello)
        rig.attach(second)
        second.data[2] = 7
        rig.process.on_message(BlockMove(MoveId(1), "store", (HostBlockId(1),), (BlockId(2),), second.incarnation))
        assert (await rig.heard(MoveResult)).moved == 1
        assert (rig.process._host.data[1] == 7).all()

    in_rig(work)


@pytest.mark.parametrize("kept", ["the same", "another layout", "another size"])
def test_what_the_service_before_had_on_the_host_is_kept_where_it_is_of_these_blocks(kept: str):
    """Of another layout its bytes would be served as something else; of another size, books and memory would differ."""

    async def work(rig: Rig) -> None:
        layout = replace(LAYOUT, head_dim=2, block_size=8) if kept == "another layout" else LAYOUT
        blocks = BLOCKS + (kept == "another size")
        assert layout.block_bytes == LAYOUT.block_bytes
        before = KVPool.create(layout, blocks, "baton-test")
        before.data[3] = 9
        reading = asyncio.create_task(rig.process._read_descriptors())
        ready = HostPoolReady(layout.fingerprint(), before.incarnation, blocks)
        for _ in range(2):  # said twice, the second is not needed
            send_descriptor(rig.link, ready, before.fd)
        before.close()
        async with asyncio.timeout(20):
            while rig.process._host is None:
                await asyncio.sleep(0)
        old = rig.process._host
        rig.attach(rig.pool())
        hello = await rig.heard(CacheHello)
        assert (hello.kept, hello.host_blocks) == (kept == "the same", BLOCKS)
        assert bool(rig.process._host.data.any()) == (kept == "the same")
        announced = rig.announced()
        assert (announced is None) == (kept == "the same"), "the engine keeps what is new for the next service"
        if announced is not None:
            os.close(announced[1])
            old.close()
        reading.cancel()
        await asyncio.wait([reading])

    in_rig(work)


def test_a_host_tier_that_does_not_fit_is_refused_with_the_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "main_memory", lambda: MemoryFacts(1 << 30, 1 << 10))

    async def work(rig: Rig) -> None:
        rig.attach(rig.pool())
        with pytest.raises(InvalidConfig, match=r"kv_host_gib is 1e-05, and .* of memory are free"):
            await asyncio.wait_for(asyncio.shield(rig.process._broken), 20)

    in_rig(work)


def test_ranks_reserve_their_memory_one_after_the_other(tmp_path, monkeypatch):
    """Each compared its own part with what was free, at the same time, and the kernel had to kill one of them later."""
    part = BLOCKS * LAYOUT.block_bytes
    free, checked = [part * 3 // 2], Barrier(2)

    def facts() -> MemoryFacts:
        found = MemoryFacts(0, free[0])
        with contextlib.suppress(BrokenBarrierError):
            checked.wait(0.2)  # until the other rank has checked too, if it may
        return found

    def create(layout: KVLayout, blocks: int, name: str) -> str:
        free[0] -= blocks * layout.block_bytes
        return name

    monkeypatch.setattr(module, "main_memory", facts)
    monkeypatch.setattr(module.KVPool, "create", create)
    worker = WorkerConfig(ranks=2, rendezvous=str(tmp_path))
    config = CacheConfig(tiers=TIERS, worker=worker, log_level="info", log_format="text")
    process: Any = SimpleNamespace(_config=config)
    process._checked_host_pool = partial(CacheProcess._checked_host_pool, process)

    def made(_: int) -> bool:
        try:
            return bool(CacheProcess._make_host_pool(process, LAYOUT, BLOCKS))
        except InvalidConfig:
            return False

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(made, range(2))) == [False, True]
