"""Two engines with real cache services: one's blocks are pulled into the other's pool, whatever happens to the processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from certificates import Certificates, write_secret
from chaos_server import Process
from engine_rig import Rig
from fake_worker import expected
from run_loop import finish

from baton.config import CacheConfig, KVConfig, TiersConfig
from baton.core.effects import SendToCache
from baton.core.events import BlocksMoved, CacheLost, CacheReady
from baton.kvpool.pool import KVPool
from baton.protocol.ids import MoveId
from baton.protocol.moves import BlockMove, MoveResult
from baton.runtime.cache.process import CacheProcess
from baton.runtime.engine import transfer_port
from baton.runtime.processes.private_folder import PREFIX
from baton.runtime.wire.channel import Channel
from baton.trust.secret import create_secret

pytestmark = pytest.mark.usefixtures("child_path")


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where these engines make their directories. None is left."""
    with tempfile.TemporaryDirectory() as made:
        monkeypatch.setattr("baton.runtime.processes.private_folder.usual_parent", lambda: Path(made))
        yield Path(made)
        assert os.listdir(made) == [], "directories are left"


TIERS = TiersConfig(kv_host_gib=0.001)
BLOCKS = 48
NEAR: dict[str, Any] = {}


@pytest.fixture(params=[pytest.param("near", marks=pytest.mark.slow), "over the network"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """How these instances read each other's pools."""
    if request.param == "near":
        return NEAR
    create_secret(tmp_path / "secret")
    return {"cluster_secret": str(tmp_path / "secret"), "transfer_address": "127.0.0.1:0"}


class Instance(Rig):
    """An engine of which we see what its core is told of the cache service."""

    def __init__(self, role: str, orders: dict[str, Any] | None = None, way: dict[str, Any] = NEAR, **options: Any) -> None:
        engine = {"role": role, **way, **options.pop("engine", {})}
        self._scheme = "tcp" if way else "unix"
        super().__init__(orders, engine=engine, blocks=BLOCKS, **options)
        self.told: list[Any] = []
        self._numbers = count(10**6)

    async def __aenter__(self) -> Instance:
        waits, self.waits = self.waits, False
        await super().__aenter__()
        machine = self.engine._machine
        dispatch = machine.dispatch

        def heard(event: Any) -> None:
            self.told.append(event)
            dispatch(event)

        machine.dispatch = heard
        if waits:
            await self.until(lambda: any(type(event) is CacheReady for event in self.told))
        return self

    @property
    def address(self) -> str:
        """Where this test reads it."""
        return next(address for address in self.engine.peer_address.split() if address.startswith(self._scheme))

    @property
    def pool_ready(self) -> Any:
        return self.engine._pool.pool

    def pool(self, rank: int = 0) -> KVPool:
        held = self.engine._pool._pools[rank]
        return KVPool.attach(os.dup(held.fd), held.ready)

    @property
    def cache(self) -> Any:
        return self.engine._children.get("cache")

    def tell_pull(self, peer: Instance, blocks: list[int], **changes: Any) -> MoveId:
        number = MoveId(next(self._numbers))
        values = {
            "device": tuple(blocks),
            "pool": self.pool_ready.incarnation,
            "seconds_max": 20.0,
            "peer": peer.address,
            "peer_pool": peer.pool_ready.incarnation,
            "peer_blocks": tuple(blocks),
        }
        self.cache.control.send(BlockMove(number, "pull", (), **(values | changes)))
        return number

    def result(self, number: MoveId) -> MoveResult | None:
        return next((event.result for event in self.told if type(event) is BlocksMoved and event.result.id == number), None)

    async def pull(self, peer: Instance, blocks: list[int], **changes: Any) -> MoveResult:
        number = self.tell_pull(peer, blocks, **changes)
        await self.until(lambda: self.result(number) is not None)
        result = self.result(number)
        assert result is not None
        return result

    async def lose_cache(self, until_ready: bool = True) -> None:
        process, losses = Process(self.cache.process.pid), self.heard(CacheLost)
        os.kill(process.pid, signal.SIGKILL)
        await self.until(lambda: self.heard(CacheLost) > losses)
        if until_ready:
            ready = self.heard(CacheReady)
            await self.until(lambda: self.heard(CacheReady) > ready)

    def heard(self, kind: type) -> int:
        return sum(type(event) is kind for event in self.told)


def fill(instance: Instance, seed: int) -> np.ndarray:
    pool = instance.pool()
    numbers = np.random.default_rng(seed).integers(1, 2**20, pool.data.shape)
    pool.data[:] = numbers
    pool.close()
    return numbers.astype(np.float32)


def read(instance: Instance) -> np.ndarray:
    pool = instance.pool()
    numbers: np.ndarray = pool.data.copy()
    pool.close()
    return numbers


def test_blocks_go_between_instances_of_one_machine():
    test_blocks_go_from_one_instance_to_the_other(TIERS, NEAR)


@pytest.mark.parametrize("tiers", [TiersConfig(), pytest.param(TIERS, marks=pytest.mark.slow)], ids=["no tiers", "tiers"])
def test_blocks_go_from_one_instance_to_the_other(tiers: TiersConfig, way: dict[str, Any]):
    async def main() -> None:
        options: dict[str, Any] = {"engine": {"tiers": tiers}}
        async with Instance("prefill", way=way, **options) as prefill, Instance("decode", way=way, **options) as decode:
            assert prefill.engine.peer_address != decode.engine.peer_address
            path = Path(prefill.engine.peer_address.split()[0].removeprefix("unix:"))
            assert path.is_socket()
            assert path.parent.stat().st_mode & 0o777 == 0o700
            await decode.until(lambda: decode.stats.cache_service)
            sent, blocks = fill(prefill, 1), [3, 4, 5, 40, 7]
            result = await decode.pull(prefill, blocks)
            assert (result.moved, result.error) == (5, None)
            arrived = read(decode)
            assert np.array_equal(arrived[blocks], sent[blocks])
            assert not np.delete(arrived, blocks, axis=0).any()
            assert await decode.answer("a") == expected(5, 12)

    finish(main())


def test_blocks_go_over_tls_with_any_secret_of_the_file_and_not_from_a_revoked_instance(tmp_path: Path):
    old, new, made = "o" * 40, "n" * 40, Certificates(tmp_path)
    secrets = {name: write_secret(tmp_path / name, *lines) for name, lines in (("p0", (old, new)), ("d0", (new, old)))}

    def secure(name: str) -> dict[str, Any]:
        certificate, key, authorities = made.files(name)
        tls = {"cluster_ssl_certfile": certificate, "cluster_ssl_keyfile": key, "cluster_ssl_ca_certs": authorities}
        own = {"cluster_secret": str(secrets[name]), "transfer_address": "127.0.0.1:0", "name": name}
        return own | tls

    async def main() -> None:
        async with Instance("prefill", way=secure("p0")) as prefill, Instance("decode", way=secure("d0")) as decode:
            sent, blocks = fill(prefill, 1), [3, 4, 5, 40, 7]
            result = await decode.pull(prefill, blocks)
            assert (result.moved, result.error) == (5, None)
            assert np.array_equal(read(decode)[blocks], sent[blocks])
            for listed, revoked in (("p0", "d0"), ("d0", "p0"), ("p0", "d0.example")):
                write_secret(secrets[listed], new, f"revoked {revoked}")
                result = await decode.pull(prefill, blocks)
                assert result.moved == 0
                assert f"{revoked} is revoked" in (result.error or "")
                write_secret(secrets[listed], new)
                assert (await decode.pull(prefill, blocks)).moved == 5
            assert await decode.answer("a") == expected(5, 12), "it computes by itself anyway"

    finish(main())


@pytest.mark.slow
def test_a_mixed_instance_with_a_cache_service_is_a_peer_too_and_one_without_has_no_address(way: dict[str, Any]):
    async def main() -> None:
        async with Instance("mixed", way=way, engine={"tiers": TIERS}) as mixed, Instance("decode", way=way) as decode:
            sent = fill(mixed, 1)
            assert (await decode.pull(mixed, [1, 2])).moved == 2
            assert np.array_equal(read(decode)[[1, 2]], sent[[1, 2]])
        async with Rig(engine={"role": "mixed"}) as alone:
            assert alone.engine.peer_address == ""

    finish(main())


@pytest.mark.slow
def test_without_prefix_caching_an_instance_of_a_pair_has_a_messenger_and_no_tiers():
    async def main() -> None:
        options: dict[str, Any] = {"kv": KVConfig(prefix_caching=False), "engine": {"tiers": TIERS}}
        async with Instance("prefill", **options) as prefill, Instance("decode", **options) as decode:
            await decode.until(lambda: decode.stats.cache_service)
            assert decode.stats.host_blocks == 0
            assert (await decode.pull(prefill, [1])).moved == 1

    finish(main())


def test_losses_of_a_pair_cost_no_pool_and_no_address(way: dict[str, Any]):
    """Messengers, a service with pulls under way, and a worker: each is started again, and blocks go as before."""

    async def main() -> None:
        async with Instance("prefill", way=way) as prefill, Instance("decode", way=way) as decode:
            sent, address, pool = fill(prefill, 1), prefill.engine.peer_address, prefill.pool_ready
            assert (await decode.pull(prefill, [1])).moved == 1
            await prefill.lose_cache()
            assert (prefill.engine.peer_address, prefill.pool_ready) == (address, pool)
            assert (await decode.pull(prefill, [2])).moved == 1

            os.kill(prefill.cache.process.pid, signal.SIGSTOP)  # so that they are certainly under way
            numbers = [decode.tell_pull(prefill, [block]) for block in range(10, 20)]
            await decode.lose_cache()
            os.kill(prefill.cache.process.pid, signal.SIGCONT)
            assert not any(decode.result(number) for number in numbers), "their end is the end of the service"
            assert (await decode.pull(prefill, [3])).moved == 1
            assert np.array_equal(read(decode)[1:4], sent[1:4])
            assert await decode.answer("a") == expected(5, 12)
            assert prefill.stats.worker_losses == decode.stats.worker_losses == 0

            os.kill(prefill.engine._children.get("worker").process.pid, signal.SIGKILL)
            assert (await decode.pull(prefill, [4])).moved == 1
            assert await prefill.answer("a") == expected(5, 12)
            assert (await decode.pull(prefill, [5])).moved == 1
            assert np.array_equal(read(decode)[1:6], sent[1:6])

    finish(main())


def test_the_pool_of_a_mixed_worker_that_was_lost_is_unmapped_by_its_readers(way: dict[str, Any]):
    async def main() -> None:
        async with Instance("mixed", way=way, engine={"tiers": TIERS}) as mixed, Instance("decode", way=way) as decode:
            old = mixed.pool_ready.incarnation
            assert (await decode.pull(mixed, [1])).moved == 1
            pools = lambda: sum("memfd:baton-kv" in line for line in maps.read_text().splitlines())  # noqa: E731
            maps = Path(f"/proc/{decode.cache.process.pid}/maps")
            assert pools() == (1 if way else 2)
            os.kill(mixed.engine._children.get("worker").process.pid, signal.SIGKILL)
            await decode.until(lambda: pools() == 1)
            await mixed.until(lambda: mixed.engine._pool.attached("cache") and mixed.pool_ready.incarnation != old)
            assert (await decode.pull(mixed, [2], peer_pool=old)).moved == 0
            assert (await decode.pull(mixed, [2])).moved == 1

    finish(main())


def test_an_engine_that_was_killed_leaves_a_directory_that_the_next_one_removes(place: Path):
    abandoned = place / f"{PREFIX}dead"
    abandoned.mkdir(mode=0o700)
    (abandoned / "peer.sock").touch()

    async def main() -> None:
        async with Instance("decode") as decode:
            assert [path.name for path in place.iterdir()] == [Path(decode.engine.peer_address).parent.name]

    finish(main())


def test_a_start_that_fails_leaves_no_directory():
    async def main() -> None:
        rig = Instance("decode", {"cache": {"fails": "create"}})
        rig.waits = False
        async with rig:
            with pytest.raises(Exception, match="the cache service cannot create"):
                await asyncio.wait_for(rig.running, 30)

    finish(main())


def test_without_a_place_for_its_socket_a_mixed_instance_serves_and_one_of_a_pair_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("baton.runtime.processes.private_folder.usual_parent", lambda: place / "nowhere")

    async def main() -> None:
        async with Rig(engine={"role": "mixed", "tiers": TIERS}) as mixed:
            assert mixed.engine.peer_address == ""
            assert await mixed.answer("a") == expected(5, 12)
        rig = Rig(engine={"role": "decode"}, blocks=BLOCKS)
        rig.waits = False
        async with rig:
            with pytest.raises(OSError, match="nowhere"):
                await asyncio.wait_for(rig.running, 30)

    finish(main())


def test_a_pull_that_nobody_can_carry_out_is_answered():
    """A cache service without a messenger: else whoever waits for it would wait for its deadline."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        link, other = socket.socketpair()
        config = CacheConfig(log_level="warning", log_format="text")
        end, control = await Channel.open(ours), await Channel.open(theirs)
        CacheProcess(config, control, link).on_message(BlockMove(MoveId(7), "pull", ()))
        assert await end.receive() == MoveResult(MoveId(7), 0, error="there is no messenger")
        for one in (end, control, link, other):
            one.close()
        await asyncio.sleep(0)

    finish(main())


def test_a_port_that_is_opened_by_a_session_is_served_at_once_and_by_every_later_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No name is looked up at the start: the address is that of the first connection to a router."""
    create_secret(tmp_path / "secret")
    way = {"cluster_secret": str(tmp_path / "secret")}
    outside = SimpleNamespace(ip_address=lambda host: SimpleNamespace(is_loopback=False, version=4))
    monkeypatch.setattr(transfer_port, "ipaddress", outside)

    async def main() -> None:
        async with Instance("prefill", way=way) as source, Instance("decode", way=way) as target:
            assert "tcp:" not in source.engine.peer_address
            assert source.engine.reached("127.0.0.1"), "as router_links.py says it"
            assert not source.engine.reached("127.0.0.1")
            numbers = fill(source, 5)
            for turn in range(2):
                result = await target.pull(source, [1 + turn, 7])
                assert (result.moved, result.error) == (2, None)
                pool = target.pool()
                assert np.array_equal(pool.data[[1 + turn, 7]], numbers[[1 + turn, 7]])
                pool.close()
                await source.lose_cache()
            await target.until(lambda: target.engine.stats().pulls == {"tcp/copied": 2})
            assert target.engine.stats().pull_bytes["tcp"] == 4 * numbers[0].nbytes

    finish(main())


def test_each_rank_pulls_from_the_same_rank_of_the_other_instance():
    """The core names the pools of a set by that of rank 0, and a block by one number."""

    async def main() -> None:
        async with Instance("prefill", ranks=2) as prefill, Instance("decode", ranks=2) as decode:
            theirs, ours = ([one.pool(rank) for rank in (0, 1)] for one in (prefill, decode))
            assert theirs[1].incarnation == theirs[0].incarnation + 1
            for rank in (0, 1):
                theirs[rank].data[3:5] = 10 + rank
            source = {"peer": prefill.engine.peer_address, "peer_pool": theirs[0].incarnation, "peer_blocks": (3, 4)}
            move = BlockMove(MoveId(10**6), "pull", (), (6, 7), ours[0].incarnation, seconds_max=20.0, **source)
            decode.engine._cache.send(SendToCache(move))
            await decode.until(lambda: decode.result(move.id) is not None)
            assert decode.result(move.id).moved == 2, decode.result(move.id)
            assert [int(pool.data[7].flat[0]) for pool in ours] == [10, 11]
            for pool in (*ours, *theirs):
                pool.close()
            stale = msgspec.structs.replace(move, id=MoveId(10**6 + 1), peer=prefill.engine.peer_address.split()[0])
            decode.engine._cache.send(SendToCache(stale))
            await decode.until(lambda: decode.result(stale.id) is not None)
            assert decode.result(stale.id).moved == 0, "an instance of one rank"

    finish(main())
