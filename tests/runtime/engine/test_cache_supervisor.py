"""What a cache service says of itself must be what the books of the instance say: else its blocks are not those."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.effects import SendToCache
from baton.core.events import CacheLost, CacheReady
from baton.core.startup import plan_startup
from baton.errors import PeerError
from baton.protocol.control import CacheHello, CacheStats, InstanceStats
from baton.protocol.ids import MoveId, PoolIncarnation
from baton.protocol.moves import StorageIdentity, StorageQuery
from baton.runtime.engine.cache_supervisor import CacheSupervisor

HELLO = CacheHello(PoolIncarnation(1), 8, kept=True)


class Rig:
    """`host_blocks`: what the books are about. None: the start is not over."""

    def __init__(self, host_blocks: int | None) -> None:
        self.told: list[Any] = []
        self.reached: list[Any] = []
        self.machine: Any = SimpleNamespace(instance=None, dispatch=self.told.append)
        startup: Any = SimpleNamespace(reach=lambda *milestone: self.reached.append(milestone))
        plan = plan_startup(blocks_given=True, role="mixed", tiers=True)
        self.keeper = CacheSupervisor(plan, SimpleNamespace(), self.machine, startup)  # type: ignore[arg-type]
        if host_blocks is not None:
            self.begin(host_blocks)

    def begin(self, host_blocks: int) -> None:
        self.machine.instance = SimpleNamespace(
            board=SimpleNamespace(tiers=SimpleNamespace(host=SimpleNamespace(total=host_blocks)))
        )


def test_one_that_fits_is_told_to_the_machine_also_if_it_was_quicker_than_the_start():
    rig = Rig(8)
    rig.keeper.on_hello(HELLO)
    rig.keeper.on_lost()
    assert rig.told == [CacheReady(True, False), CacheLost()]
    early = Rig(None)
    early.keeper.on_hello(HELLO)
    assert (early.told, early.reached) == ([], [("ready", "cache")])
    early.begin(8)
    early.keeper.on_begun()
    assert early.told == [CacheReady(True, False)]


def test_counters_of_copies_between_instances_outlive_the_service():
    rig, stats = Rig(8), InstanceStats()
    rig.keeper.on_stats(CacheStats({}, {"tcp/copied": 2}, {"tcp": 100}, {"tcp": 7}, {"unix/opened": 1}))
    rig.keeper.on_lost()
    rig.keeper.add_counters(stats)
    assert (stats.pulls, stats.pull_bytes, stats.readers) == ({"tcp/copied": 2}, {"tcp": 100}, {"unix/opened": 1})
    rig.keeper.on_stats(CacheStats({}, {"tcp/copied": 1, "tcp/lost": 1}, {"tcp": 10}, {"tcp": 1}))
    rig.keeper.add_counters(stats)
    assert stats.pulls == {"tcp/copied": 3, "tcp/lost": 1}
    assert (stats.pull_bytes, stats.pull_microseconds) == ({"tcp": 110}, {"tcp": 8})


def test_storage_gets_the_identity_before_what_depends_on_it():
    """Once per life of the service, and again when the weights have changed."""
    rig, sent = Rig(8), list[Any]()
    child = SimpleNamespace(life=1, control=SimpleNamespace(send=sent.append))
    rig.keeper._children = SimpleNamespace(get=lambda name: child)  # type: ignore[assignment]
    rig.machine.instance.fingerprint = b"old"
    first, second, third, fourth = (StorageQuery(MoveId(number), ()) for number in range(4))
    rig.keeper.send(SendToCache(first))
    rig.keeper.send(SendToCache(second))
    child.life = 2
    rig.keeper.send(SendToCache(third))
    rig.machine.instance.fingerprint = b"new"
    rig.keeper.send(SendToCache(fourth))
    old, new = StorageIdentity(b"old"), StorageIdentity(b"new")
    assert sent == [old, first, second, old, third, new, fourth]


def test_another_number_of_host_blocks_is_refused():
    """The machine would send moves about blocks that are not there."""
    with pytest.raises(PeerError, match="has 8 host blocks, and the books are about 9"):
        Rig(9).keeper.on_hello(HELLO)


def test_a_pool_that_others_read_elsewhere_is_refused():
    """Routers were told another address."""
    with pytest.raises(PeerError, match="elsewhere than it was ordered to"):
        Rig(8).keeper.on_hello(CacheHello(PoolIncarnation(1), 8, True, "", "unix:/elsewhere"))
