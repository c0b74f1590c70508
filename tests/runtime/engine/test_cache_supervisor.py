"""What a cache service says of itself must be what the books of the instance say: else its blocks are not those."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.config import EngineConfig
from baton.core.effects import SendToCache
from baton.core.events import CacheLost, CacheReady
from baton.core.rank_messages import CacheRanks
from baton.core.startup import plan_startup
from baton.errors import PeerError
from baton.protocol.control import CacheHello, CacheStats, InstanceStats
from baton.protocol.ids import MoveId, PoolIncarnation
from baton.protocol.moves import BlockMove, StorageIdentity, StorageQuery
from baton.protocol.pool import ReadersSocket, of_rank, set_incarnation
from baton.runtime.engine.cache_supervisor import CacheSupervisor
from baton.runtime.engine.rank_messages import for_rank
from baton.runtime.wire.descriptors import take_descriptor

HELLO = CacheHello(PoolIncarnation(1), 8, kept=True)


class Rig:
    """`host_blocks`: host blocks that the instance expects. None: it is still starting."""

    def __init__(self, host_blocks: int | None, ranks: int = 1) -> None:
        self.told: list[Any] = []
        self.reached: list[Any] = []
        self.machine: Any = SimpleNamespace(instance=None, dispatch=self.told.append)
        startup: Any = SimpleNamespace(reach=lambda *milestone: self.reached.append(milestone))
        plan = plan_startup(blocks_given=True, role="mixed", tiers=True)
        self.keeper = CacheSupervisor(plan, SimpleNamespace(), self.machine, startup, ranks)  # type: ignore[arg-type]
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
    with pytest.raises(PeerError, match="has 8 host blocks, and 9 are expected"):
        Rig(9).keeper.on_hello(HELLO)


def test_a_pool_that_others_read_elsewhere_is_refused():
    """Routers were told another address."""
    with pytest.raises(PeerError, match="elsewhere than it was ordered to"):
        Rig(8).keeper.on_hello(CacheHello(PoolIncarnation(1), 8, True, "", "unix:/elsewhere"))


@pytest.fixture
def of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheSupervisor]:
    """Two ranks, whose pools can be read over the network."""
    monkeypatch.setattr("baton.runtime.processes.private_folder.usual_parent", lambda: tmp_path)
    supervisor = Rig(8, ranks=2).keeper
    supervisor.make_folder()
    routers = ("tcp://192.0.2.7:8100",)
    supervisor.open_ports(EngineConfig(cluster_secret="file", transfer_address="127.0.0.1:0", routers=routers))
    yield supervisor
    supervisor.close()


def test_each_rank_is_read_at_addresses_of_its_own_the_shared_memory_first(of_two: CacheSupervisor):
    lines = [line.split() for line in of_two.peer.split("\n")]
    assert [near.rpartition("/")[2] for near, _ in lines] == ["peer-0.sock", "peer-1.sock"]
    assert len({far for _, far in lines}) == 2
    pull = BlockMove(MoveId(1), "pull", (), peer=of_two.peer, peer_pool=set_incarnation(5))
    for rank in range(2):
        sent = for_rank(pull, rank, 2)
        assert (sent.peer.split(), sent.peer_pool) == (lines[rank], of_rank(set_incarnation(5), rank))
    assert of_two.reads_others


@pytest.mark.parametrize("lines", ["unix:/a", "unix:/a\nunix:/b\nunix:/c"])
def test_a_rank_pulls_nothing_from_an_instance_with_another_number_of_ranks(lines: str):
    """Its blocks have other heads. Routers refuse such an instance; a pull that names one anyway leads nowhere."""
    pull = BlockMove(MoveId(1), "pull", (), peer=lines, peer_pool=set_incarnation(5))
    assert [for_rank(pull, rank, 2).peer for rank in range(2)] == ["", ""]


def test_each_rank_of_a_new_service_gets_its_own_socket(of_two: CacheSupervisor):
    pairs = [socket.socketpair() for _ in range(2)]
    ranks = [SimpleNamespace(rank=rank, descriptors=ours) for rank, (ours, _) in enumerate(pairs)]
    of_two.on_started(SimpleNamespace(name="cache", ranks=ranks))  # type: ignore[arg-type]
    for line, (ours, theirs) in zip(of_two.peer.split("\n"), pairs, strict=True):
        received = take_descriptor(theirs)
        assert received is not None
        message, fd = received
        with socket.socket(fileno=fd) as listener, ours, theirs:
            assert message == ReadersSocket(line.split()[1])
            assert line.endswith(f":{listener.getsockname()[1]}")


def test_a_rank_that_others_read_elsewhere_is_refused(of_two: CacheSupervisor):
    """The hello of the first rank alone was compared."""
    ranks = CacheRanks(2)
    assert ranks.combined(0, CacheHello(PoolIncarnation(1), 8, True, "", of_two.peer.split("\n")[0])) is None
    hello = ranks.combined(1, CacheHello(PoolIncarnation(2), 8, True, "", "tcp://127.0.0.1:1"))
    assert isinstance(hello, CacheHello)
    with pytest.raises(PeerError, match="elsewhere than it was ordered to"):
        of_two.on_hello(hello)


def test_ranks_without_any_address_are_read_nowhere():
    """Not at an address for each, all of them empty."""
    assert Rig(8, ranks=2).keeper.peer == ""
