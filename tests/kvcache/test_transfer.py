"""Transfer carries out what it is told, of the pool that is named, and says how far it got."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

import pytest

from baton.errors import DeviceError, StorageFailed
from baton.kvcache import transfer as module
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.transfer import Transfer
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool
from baton.protocol.ids import BlockId, BlockKey, HostBlockId, MoveId, PoolIncarnation
from baton.protocol.moves import BlockMove, MoveResult, StorageAnswer, StorageQuery

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=4, block_size=4, dtype="float32")
KEYS = (BlockKey(b"a" * 32), BlockKey(b"b" * 32))
SECONDS = 5.0


class Store:
    """A backend that does what the test says in `act`."""

    wants_tokens = False

    def __init__(self) -> None:
        self.left: list[float] = []
        self.closed = False

    def contains_prefix(self, keys, deadline, tokens=None) -> int:
        return self._called(len(keys), deadline)

    def get(self, keys, into, deadline, tokens=None) -> int:
        return self._called(len(keys), deadline)

    def put(self, keys, blocks, deadline, tokens=None) -> int:
        return self._called(len(keys), deadline)

    def _called(self, count: int, deadline: Deadline) -> int:
        self.left.append(deadline.left())
        return self.act(count)

    def act(self, count: int) -> int:
        return count

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.closed = True


class Rig:
    """Block i of the device has the number i everywhere, block i of the host 100 + i."""

    def __init__(self) -> None:
        self.store = Store()
        self.answers: list[Any] = []
        self.host = KVPool.create(LAYOUT, 4, "baton-test")
        self.transfer = Transfer(self.host, self.store, self.answers.append)
        self.device = self.pool()
        for block in range(4):
            self.host.data[block] = 100 + block
        self.transfer.attach(self.device)

    def pool(self) -> KVPool:
        pool = KVPool.create(LAYOUT, 4, "baton-test")
        for block in range(4):
            pool.data[block] = block
        return pool

    def submit(self, kind: str, pool: PoolIncarnation | None = None) -> MoveResult:
        """Blocks 0 and 2 of the host, 3 and 1 of the device."""
        host, device = (HostBlockId(0), HostBlockId(2)), (BlockId(3), BlockId(1))
        pool = self.device.incarnation if pool is None else pool
        keys = KEYS if kind in ("put", "fetch") else ()
        self.transfer.submit(BlockMove(MoveId(1), kind, host, device, pool, keys, SECONDS)).result(30)  # type: ignore[arg-type]
        return self.answers[-1]

    def content(self) -> tuple[list[int], list[int]]:
        """What is in the blocks of device and host."""
        return tuple([int(pool.data[block, 0]) for block in range(4)] for pool in (self.device, self.host))  # type: ignore[return-value]


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.transfer.close()
    rig.device.close()
    rig.host.close()


UNTOUCHED = ([0, 1, 2, 3], [100, 101, 102, 103])


def test_blocks_are_copied_where_they_are_told_to(rig):
    result = rig.submit("store")
    assert (result.moved, result.error) == (2, None)
    assert rig.content() == ([0, 1, 2, 3], [3, 101, 1, 103])
    rig.host.data[0] = 7
    assert rig.submit("load").moved == 2
    assert rig.content() == ([0, 1, 2, 7], [7, 101, 1, 103])


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_move_about_another_pool_copies_nothing(rig, kind):
    """It was told before the worker was lost, and comes when the next one's pool is attached: those blocks are others'."""
    result = rig.submit(kind, PoolIncarnation(rig.device.incarnation + 1))
    assert (result.moved, result.error) == (0, "another pool is attached")
    assert rig.content() == UNTOUCHED
    assert rig.transfer.detach() is rig.device
    result = rig.submit(kind)
    assert (result.moved, result.error) == (0, "another pool is attached")
    assert rig.content() == UNTOUCHED


def test_what_a_device_says_no_to_is_in_the_result(rig, monkeypatch):
    def fails(*blocks: object) -> None:
        raise DeviceError("out of order")

    monkeypatch.setattr(rig.transfer._copies, "load", fails, raising=False)
    monkeypatch.setattr(rig.transfer._copies, "store", fails, raising=False)
    for kind in ("store", "load"):
        assert rig.submit(kind) == MoveResult(MoveId(1), 0, error="out of order")


@pytest.mark.parametrize("kind", ["put", "fetch"])
def test_a_store_that_fails_on_the_way_says_how_far_it_got_and_that_it_failed(rig, kind):
    """A fetch that is believed whole would serve whatever lay in the host's block; one without an error would never open the
    circuit."""

    def fails(count: int) -> int:
        raise StorageFailed("io", "the disk is broken", 1)

    rig.store.act = fails
    result = rig.submit(kind)
    assert (result.moved, result.error) == (1, "the disk is broken")


def test_a_question_that_fails_is_no_miss(rig):
    def fails(count: int) -> int:
        raise StorageFailed("timeout", "it took too long", 1)

    query = StorageQuery(MoveId(2), KEYS, SECONDS)
    rig.transfer.submit(query).result(30)
    rig.store.act = fails
    rig.transfer.submit(query).result(30)
    assert rig.answers == [StorageAnswer(MoveId(2), 2), StorageAnswer(MoveId(2), 0, "it took too long")]


def test_the_deadline_is_that_of_the_message(rig):
    rig.submit("put")
    rig.submit("fetch")
    rig.transfer.submit(StorageQuery(MoveId(2), KEYS, SECONDS)).result(30)
    assert len(rig.store.left) == 3
    assert all(left <= SECONDS for left in rig.store.left)


def test_what_was_made_for_a_pool_ends_with_it(rig, monkeypatch):
    """On a GPU it pins the host's memory: pinned twice it is refused."""
    made: list[tuple[KVPool, list[str]]] = []

    class Copies:
        def __init__(self, device: KVPool, host: KVPool) -> None:
            made.append((device, []))
            self.close = lambda said=made[-1][1]: said.append("closed")

    monkeypatch.setattr(module, "tier_copies", Copies)
    other = rig.pool()
    rig.transfer.attach(rig.device)
    rig.transfer.attach(other)
    assert made == [(rig.device, ["closed"]), (other, [])]
    rig.transfer.detach()
    assert made[-1] == (other, ["closed"])
    other.close()


def test_it_ends_while_a_store_stands_still(rig):
    begun, go_on = Event(), Event()

    def stands_still(count: int) -> int:
        begun.set()
        go_on.wait(60)
        return count

    rig.store.act = stands_still
    rig.transfer.submit(StorageQuery(MoveId(2), KEYS, SECONDS))
    assert begun.wait(30)
    ending = Thread(target=rig.transfer.close, daemon=True)
    ending.start()
    ending.join(5)
    ended = not ending.is_alive()
    go_on.set()
    ending.join(20)
    assert ended, "the end waits for a store"
    assert rig.store.closed


def test_the_time_of_a_call_of_storage_runs_while_it_waits_for_a_thread(rig, monkeypatch):
    """Four calls that hang would else give each of those behind them its whole time again."""
    clock = [1000.0]
    monkeypatch.setattr("baton.kvcache.storage.backend.monotonic", lambda: clock[0])
    gate, begun = Event(), []

    def waits(count: int) -> int:
        begun.append(count)
        gate.wait(20)
        return count

    rig.store.act = waits
    calls = [rig.transfer.submit(StorageQuery(MoveId(number), KEYS, SECONDS)) for number in range(module.STORAGE_THREADS)]
    while len(begun) < module.STORAGE_THREADS:
        pass
    calls.append(rig.transfer.submit(StorageQuery(MoveId(10), KEYS, SECONDS)))
    calls.append(
        rig.transfer.submit(BlockMove(MoveId(11), "put", (HostBlockId(0), HostBlockId(2)), keys=KEYS, seconds_max=SECONDS))
    )
    clock[0] += 3.0
    gate.set()
    for call in calls:
        call.result(30)
    assert rig.store.left == [SECONDS] * module.STORAGE_THREADS + [SECONDS - 3.0] * 2
