"""The engine's hold on pools: whose they are, who still has one mapped, and that no descriptor is kept."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from run_loop import finish

from baton.core.startup import plan_startup
from baton.errors import PeerError
from baton.protocol.control import LoadProgress
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import DetachPool, HostPoolReady, PoolReady
from baton.runtime.engine import pool_registry as module
from baton.runtime.engine.child_messages import ChildMessages
from baton.runtime.engine.pool_registry import PoolRegistry
from baton.runtime.wire.descriptors import take_descriptor

FIRST, SECOND = (PoolReady(b"f" * 32, PoolIncarnation(number), 8) for number in (1, 2))


class FakeChild:
    def __init__(self, name: str) -> None:
        self.name, self.rank, self.ranks = name, 0, (self,)
        self.descriptors, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.said: list[Any] = []
        self.killed = 0
        self.control = SimpleNamespace(send=self.said.append)

    def kill(self) -> None:
        self.killed += 1

    def handed(self) -> PoolReady:
        """What it was handed next."""
        message, fd = take_descriptor(self.theirs)
        os.close(fd)
        return message


class Rig:
    """Of a mixed instance with tiers: the worker makes the pool, the cache service attaches."""

    def __init__(self) -> None:
        self.children = {name: FakeChild(name) for name in ("worker", "cache")}
        plan = plan_startup(blocks_given=True, role="mixed", tiers=True)
        self.holder = PoolRegistry(plan, self.children)  # type: ignore[arg-type]
        self.worker, self.cache = self.children["worker"], self.children["cache"]

    def announce(self, ready: PoolReady, by: str = "worker") -> None:
        self.holder.on_announced(self.children[by], ready, os.open("/dev/null", os.O_RDONLY))  # type: ignore[arg-type]

    def close(self) -> None:
        self.holder.close_all()
        for child in self.children.values():
            child.descriptors.close()
            child.theirs.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    before = len(os.listdir("/proc/self/fd"))
    rig = Rig()
    yield rig
    rig.close()
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was kept"


def test_the_pools_of_a_set_are_attached_when_each_rank_has_its_own(rig):
    """Before, a move would name a block that one rank has not mapped."""
    of_ranks = [SimpleNamespace(name="worker", rank=rank) for rank in range(2)]
    readers = [SimpleNamespace(name="cache", rank=rank) for rank in range(2)]
    rig.cache.ranks = (rig.cache, rig.cache)
    for child, ready in zip(of_ranks, (FIRST, SECOND), strict=True):
        rig.holder.on_announced(child, ready, os.open("/dev/null", os.O_RDONLY))
    for child, ready in zip(readers, (FIRST, SECOND), strict=True):
        assert not rig.holder.attached("cache")
        rig.holder.on_attached(child, ready.incarnation)
    assert rig.holder.attached("cache")


def test_the_attacher_is_handed_the_pool_and_counts_when_it_says_so(rig):
    rig.announce(FIRST)
    assert rig.cache.handed() == FIRST
    assert not rig.holder.attached("cache")
    rig.holder.on_attached(rig.cache, FIRST.incarnation)
    assert rig.holder.attached("cache")


def test_of_two_pools_the_first_is_let_go(rig):
    rig.announce(FIRST)
    rig.announce(SECOND)  # the fixture counts descriptors
    assert [rig.cache.handed(), rig.cache.handed()] == [FIRST, SECOND]
    assert rig.holder.pool == SECOND


def test_one_who_may_not_announce_a_pool_leaves_no_descriptor(rig):
    with pytest.raises(PeerError, match="which is the worker's to make"):
        rig.announce(FIRST, by="cache")


def test_memory_of_the_host_tier_is_kept_once_and_handed_to_the_next_service(rig):
    for number in (3, 4):
        ready = HostPoolReady(b"f" * 32, PoolIncarnation(number), 8)
        rig.holder.hold_host_pool(rig.cache, ready, os.open("/dev/null", os.O_RDONLY))
    rig.holder.send_pools(rig.cache)
    assert rig.cache.handed() == ready


def test_a_descriptor_that_nobody_asked_for_is_closed(rig):
    messages = ChildMessages(SimpleNamespace(), SimpleNamespace(), lambda error: None)  # type: ignore[arg-type]
    messages.on_descriptor(rig.cache, LoadProgress(0, 0), os.open("/dev/null", os.O_RDONLY))  # type: ignore[arg-type]


def test_an_attacher_that_maps_a_pool_too_late_is_told_to_let_go(rig):
    """The worker was lost while the pool was on its way: the order to unmap it was quicker than the pool."""
    rig.announce(FIRST)
    rig.announce(SECOND)
    rig.holder.on_attached(rig.cache, FIRST.incarnation)
    assert rig.cache.said == [DetachPool(FIRST.incarnation)]
    assert not rig.holder.attached("cache")


async def releasing(rig: Rig) -> asyncio.Task[None]:
    task = asyncio.create_task(rig.holder.release("worker"))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


def test_the_next_worker_waits_until_the_pool_of_the_last_one_is_unmapped(rig):
    async def main() -> None:
        rig.announce(FIRST)
        rig.holder.on_attached(rig.cache, FIRST.incarnation)
        release = await releasing(rig)
        assert rig.cache.said == [DetachPool(FIRST.incarnation)]
        assert rig.holder.pool is None
        rig.holder.on_detached(rig.cache, SECOND.incarnation)  # about another one
        for _ in range(5):
            await asyncio.sleep(0)
        assert not release.done()
        rig.holder.on_detached(rig.cache, FIRST.incarnation)
        await asyncio.wait_for(release, 20)
        assert not rig.cache.killed

    finish(main())


def test_one_that_does_not_unmap_it_is_killed_and_one_that_is_gone_is_not_waited_for(rig, monkeypatch):
    async def main() -> None:
        rig.announce(FIRST)
        monkeypatch.setattr(module, "DETACH_SECONDS", 0.01)
        await asyncio.wait_for(rig.holder.release("worker"), 20)
        assert rig.cache.killed == 1
        rig.holder.on_lost(rig.cache)
        rig.announce(SECOND)
        monkeypatch.setattr(module, "DETACH_SECONDS", 60.0)
        release = await releasing(rig)
        rig.children.pop("cache")
        rig.holder.on_lost(rig.cache)
        await asyncio.wait_for(release, 20)
        assert rig.cache.killed == 1
        rig.children["cache"] = rig.cache

    finish(main())


def test_what_another_child_made_is_not_released(rig):
    async def main() -> None:
        rig.announce(FIRST)
        await asyncio.wait_for(rig.holder.release("cache"), 20)
        assert (rig.holder.pool, rig.cache.said) == (FIRST, [])

    finish(main())


def test_each_rank_of_the_next_service_gets_the_host_memory_of_its_own(rig):
    memory = [HostPoolReady(b"f" * 32, PoolIncarnation(7 + rank), 8) for rank in range(2)]
    for rank, ready in enumerate(memory):
        rig.holder.hold_host_pool(SimpleNamespace(name="cache", rank=rank), ready, os.open("/dev/null", os.O_RDONLY))
    other = FakeChild("cache")
    other.rank = 1
    rig.holder.send_pools(SimpleNamespace(name="cache", ranks=(rig.cache, other)))
    assert [child.handed() for child in (rig.cache, other)] == memory
    for sock in (other.descriptors, other.theirs):
        sock.close()
