"""Pulls: the right bytes, from the right pool, or a result that says why not; and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from messenger_peer import LAYOUT, content, filled
from messenger_rig import BLOCKS, Rig, Served, finish, mapped, until

from baton.errors import DeviceError
from baton.kvcache import messenger, shared_memory
from baton.kvcache.shared_memory import SharedMemory
from baton.kvcache.tcp import Tcp
from baton.kvcache.transport import runs_of
from baton.kvpool import copies
from baton.kvpool.pool import KVPool

pytestmark = pytest.mark.usefixtures("no_descriptor_is_kept")


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one block."""
    monkeypatch.setattr(messenger, "RUN_BYTES", 1)


@pytest.fixture
def before_copy(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """What is to happen in the copying thread before the so-many-th copy."""

    def use(act: Callable[[int], None]) -> None:
        number = iter(range(10**9))

        def copyto(target: Any, source: Any) -> None:
            act(next(number))
            np.copyto(target, source)

        monkeypatch.setattr(copies, "np", SimpleNamespace(copyto=copyto))

    return use


@pytest.fixture(params=["unix", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    """Of one machine, or of another one."""
    return str(request.param)


# Bytes


def test_blocks_of_another_process_arrive_where_they_are_told_to(kind: str):
    async def main() -> None:
        async with Rig(kind) as rig:
            remote = rig.start(seed=3)
            sources, targets = [5, 6, 7, 1, 63, 0], [10, 11, 12, 13, 2, 63]
            result = await rig.pull(remote, sources, targets)
            assert (result.moved, result.error) == (6, None)
            assert rig.has(targets, content(3, BLOCKS)[sources])
            others = [block for block in range(BLOCKS) if block not in targets]
            assert not rig.device.data[others].any(), "and nothing else was written"

    finish(main())


def test_many_pulls_at_once_from_several_peers_use_one_connection_each(kind: str, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    transport = SharedMemory if kind == "unix" else Tcp
    real = transport.open

    async def counted(self: Any, address: str, *rest: Any) -> Any:
        opened.append(address)
        return await real(self, address, *rest)

    monkeypatch.setattr(transport, "open", counted)

    async def main() -> None:
        async with Rig(kind) as rig:
            first, second = rig.serve("first", 1), rig.serve("second", 2)
            numbers = [rig.tell((first, second)[block % 2], [block], [block]) for block in range(BLOCKS)]
            await until(lambda: all(number in rig.results for number in numbers))
            assert all(rig.results[number].moved == 1 for number in numbers)
            assert rig.has(range(0, BLOCKS, 2), content(1, BLOCKS)[0::2])
            assert rig.has(range(1, BLOCKS, 2), content(2, BLOCKS)[1::2])
            assert sorted(opened) == sorted([first.address, second.address])

    finish(main())


def test_runs_are_as_long_as_they_may_be_and_in_order():
    assert [tuple(run) for run in runs_of([3, 4, 5, 9, 8], [0, 1, 2, 3, 4], 100)] == [(3, 0, 3), (9, 3, 1), (8, 4, 1)]
    assert [tuple(run) for run in runs_of([3, 4, 5], [0, 2, 3], 100)] == [(3, 0, 1), (4, 2, 2)]
    assert list(runs_of([], [], 100)) == []
    chance = random.Random(7)
    for _ in range(200):
        sources = [chance.randrange(6) for _ in range(chance.randrange(12))]
        targets = [chance.randrange(6) for _ in sources]
        most = chance.randrange(1, 5)
        runs = list(runs_of(sources, targets, most))
        spread = [(source + place, target + place) for source, target, blocks in runs for place in range(blocks)]
        assert spread == list(zip(sources, targets, strict=True))
        assert all(1 <= run.blocks <= most for run in runs)


# What is refused


def test_another_pool_than_the_one_that_is_named_is_not_read(kind: str):
    async def main() -> None:
        async with Rig(kind) as rig:
            peer = rig.serve()
            result = await rig.pull(peer, [1], [1], peer_pool=peer.incarnation + 1)
            assert (result.moved, result.error) == (0, "that KV pool is not there any more")
            result = await rig.pull(peer, [1], [1], pool=rig.device.incarnation + 1)
            assert (result.moved, result.error) == (0, "another pool is attached")
            assert not rig.device.data.any()
            assert (await rig.pull(peer, [1], [1])).moved == 1

    finish(main())


def test_another_layout_is_refused(kind: str):
    async def main() -> None:
        async with Rig(kind) as rig:
            other = replace(LAYOUT, block_size=8)
            result = await rig.pull(rig.serve(pool=KVPool.create(other, BLOCKS)), [1], [1])
            assert (result.moved, result.error) == (0, "the KV pool has another layout")

    finish(main())


def test_a_peer_of_the_old_layout_is_not_read_into_a_pool_of_a_new_one(kind: str):
    """Weights of another shape were loaded: the peer's pool, which is open, has blocks of the old one."""

    async def main() -> None:
        async with Rig(kind) as rig:
            peer = rig.serve()
            assert (await rig.pull(peer, [1], [1])).moved == 1
            rig.messenger.detach()
            rig.device.close()
            rig.device = KVPool.create(replace(LAYOUT, head_dim=16), BLOCKS)
            rig.messenger.attach(rig.device)
            result = await rig.pull(peer, [1], [1])
            assert (result.moved, result.error) == (0, "the peer's KV pool has another layout")

    finish(main())


@pytest.mark.parametrize(
    ("sources", "targets"), [([-1], [0]), ([BLOCKS], [0]), ([0], [-1]), ([0], [BLOCKS]), ([0, 1], [0]), ([2**40], [3])]
)
def test_blocks_that_are_not_there_are_a_result_and_no_read(kind: str, sources: list[int], targets: list[int]):
    async def main() -> None:
        async with Rig(kind) as rig:
            result = await rig.pull(rig.serve(), sources, targets)
            assert result.moved == 0
            assert result.error
            assert not rig.device.data.any()

    finish(main())


@pytest.mark.parametrize(
    "address",
    [
        *("", "unix:", "unix:/nowhere/at/all", "unix:" + "x" * 300, "rdma:host:1", "unix:\0", "unix:/", "tcp:", "tcp://:1"),
        *("tcp://127.0.0.1:1", "tcp://nowhere.invalid:1", "tcp://127.0.0.1:99999", "unix:/nowhere tcp://127.0.0.1:1"),
    ],
)
def test_an_address_where_nobody_is_costs_that_pull_and_nothing_else(address: str):
    async def main() -> None:
        async with Rig() as rig:
            peer = rig.serve()
            result = await rig.pull(peer, [1], [1], peer=address)
            assert result.moved == 0
            assert result.error
            assert rig.open_peers == 0
            assert (await rig.pull(peer, [1], [1])).moved == 1

    finish(main())


# Peers that die, stand still, or have another pool


def test_a_peer_that_is_killed_in_the_middle_of_a_copy(short_runs: None, before_copy: Any):
    """What was told to be copied is copied: the memory is there while we map it. Whether it may be trusted is for others to
    say. Then it is unmapped, because nobody else will."""

    async def main() -> None:
        async with Rig() as rig:
            before = mapped()
            remote = rig.start(seed=5)
            before_copy(lambda number: remote.kill() if number == 3 else None)
            result = await rig.pull(remote, range(20), range(20))
            assert (result.moved, result.error) == (20, None)
            assert rig.has(range(20), content(5, BLOCKS)[:20])
            await until(lambda: rig.open_peers == 0)
            await until(lambda: mapped() == before)
            result = await rig.pull(remote, [30], [30])
            assert (result.moved, "cannot be opened" in result.error) == (0, True)

    finish(main())


def test_a_peer_that_was_started_again_is_opened_again(kind: str):
    """At the same address, where the socket of the killed one still lies."""

    async def main() -> None:
        async with Rig(kind) as rig:
            first = rig.start("same", 1)
            assert (await rig.pull(first, [1], [1])).moved == 1
            first.kill()
            await until(lambda: rig.open_peers == 0)
            second = rig.start("same", 2)
            assert (await rig.pull(first, [2], [2])).moved == 0
            assert (await rig.pull(second, [2], [2])).moved == 1
            assert rig.has([1, 2], np.stack([content(1, BLOCKS)[1], content(2, BLOCKS)[2]]))

    finish(main())


def test_a_pool_that_was_replaced_is_unmapped_at_once(kind: str):
    async def main() -> None:
        async with Rig(kind) as rig:
            peer = rig.serve()
            old = peer.incarnation
            assert (await rig.pull(peer, [1], [1])).moved == 1
            before = mapped()
            peer.replace(filled(9, BLOCKS))
            await until(lambda: rig.open_peers == 0)
            await until(lambda: mapped() == before - rig.maps)
            assert (await rig.pull(peer, [2], [2], peer_pool=old)).moved == 0
            assert (await rig.pull(peer, [2], [2])).moved == 1
            assert rig.has([1, 2], np.stack([content(1, BLOCKS)[1], content(9, BLOCKS)[2]]))

    finish(main())


def test_a_peer_that_stands_still_holds_up_nobody(kind: str):
    async def main() -> None:
        async with Rig(kind) as rig:
            frozen, peer = rig.start("frozen"), rig.serve()
            os.kill(frozen.process.pid, signal.SIGSTOP)
            waiting = rig.tell(frozen, [1], [1], seconds_max=0.5)
            assert (await rig.pull(peer, [2], [2])).moved == 1
            await until(lambda: waiting in rig.results)
            assert (rig.results[waiting].moved, rig.results[waiting].error) == (0, "the peer does not answer in time")
            os.kill(frozen.process.pid, signal.SIGCONT)
            assert (await rig.pull(frozen, [1], [1])).moved == 1

    finish(main())


def test_opening_has_a_deadline_of_its_own(kind: str):
    async def main() -> None:
        async with Rig(kind, peer_open_seconds=0.2) as rig:
            frozen = rig.start("frozen")
            os.kill(frozen.process.pid, signal.SIGSTOP)
            result = await rig.pull(frozen, [1], [1])
            assert (result.moved, result.error) == (0, "the peer does not answer within 0.2 s")
            assert rig.open_peers == 0

    finish(main())


# How many are open


def test_the_one_used_longest_ago_makes_room(kind: str):
    async def main() -> None:
        async with Rig(kind, peers_max=2) as rig:
            one, two, three = (rig.serve(name, seed) for seed, name in enumerate(("one", "two", "three")))
            before = mapped()
            for turn, peer in enumerate((one, two, one, three, two, one)):
                assert (await rig.pull(peer, [turn], [turn])).moved == 1
                assert rig.open_peers <= 2
            await until(lambda: mapped() == before + 2 * rig.maps)

    finish(main())


def test_one_that_is_not_used_is_closed(kind: str):
    async def main() -> None:
        async with Rig(kind, peer_idle_seconds=0.05) as rig:
            peer = rig.serve()
            before = mapped()
            for turn in range(3):
                assert (await rig.pull(peer, [turn], [turn])).moved == 1
                await until(lambda: rig.open_peers == 0)
                await until(lambda: mapped() == before)

    finish(main())


# Deadlines, and the end of our own pool


def test_what_is_not_copied_in_time_is_not_copied(short_runs: None, before_copy: Any, monkeypatch: pytest.MonkeyPatch):
    """The leading blocks count; the rest is not touched."""
    over = threading.Event()
    monkeypatch.setattr(messenger.Deadline, "passed", lambda self: over.is_set())

    async def main() -> None:
        async with Rig() as rig:
            before_copy(lambda number: over.set() if number == 4 else None)
            result = await rig.pull(rig.serve(), range(20), range(20))
            assert (result.moved, result.error) == (5, "it took too long")
            assert rig.has(range(5), content(1, BLOCKS)[:5])
            assert not rig.device.data[5:].any()

    finish(main())


def test_nothing_is_written_after_detach_has_returned(short_runs: None, before_copy: Any):
    async def main() -> None:
        async with Rig() as rig:
            peer, device = rig.serve(), rig.device
            loop, begun, detaching = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

            def stay_in_the_middle(number: int) -> None:
                if number == 3:
                    loop.call_soon_threadsafe(begun.set)
                    assert detaching.wait(20)
                    # The loop is in detach() now, and has to wait for this very copy.
                    threading.Event().wait(0.1)

            before_copy(stay_in_the_middle)
            first, second = rig.tell(peer, range(20), range(20)), rig.tell(peer, range(20, 40), range(20, 40))
            await begun.wait()
            detaching.set()
            rig.messenger.detach()
            then = device.data.copy()
            assert then[3].any(), "what was under way is whole"
            assert not then[4:].any()
            await until(lambda: first in rig.results and second in rig.results)
            await asyncio.sleep(0.1)
            assert np.array_equal(then, device.data)
            assert (rig.results[first].moved, rig.results[first].error) == (4, "the pool was detached")
            assert (rig.results[second].moved, rig.results[second].error) == (0, "the pool was detached")
            del then
            device.close()  # an error if anything of it were still in use
            rig.device = KVPool.create(LAYOUT, BLOCKS)
            rig.messenger.attach(rig.device)
            assert (await rig.pull(peer, [1], [1])).moved == 1

    finish(main())


def test_what_a_device_says_no_to_is_in_the_result(monkeypatch: pytest.MonkeyPatch):
    def fails(*copy: object) -> int:
        raise DeviceError("out of order")

    monkeypatch.setattr(shared_memory, "copy_runs", fails)

    async def main() -> None:
        async with Rig() as rig:
            result = await rig.pull(rig.serve(), [1], [1])
            assert (result.moved, result.error) == (0, "out of order")

    finish(main())


def test_detach_while_a_peer_is_being_opened(kind: str):
    async def main() -> None:
        async with Rig(kind) as rig:
            frozen = rig.start("frozen")
            os.kill(frozen.process.pid, signal.SIGSTOP)
            number = rig.tell(frozen, [1], [1])
            await asyncio.sleep(0.05)
            rig.messenger.detach()
            os.kill(frozen.process.pid, signal.SIGCONT)
            await until(lambda: number in rig.results)
            assert (rig.results[number].moved, rig.results[number].error) == (0, "another pool is attached")
            assert not rig.device.data.any()

    finish(main())


def test_a_pull_does_not_write_into_the_pool_that_has_followed_while_its_peer_was_opened(kind: str):
    """The same block numbers are somebody else's there."""

    async def main() -> None:
        async with Rig(kind) as rig:
            frozen = rig.start("frozen")
            os.kill(frozen.process.pid, signal.SIGSTOP)
            number = rig.tell(frozen, [1], [1])
            await until(lambda: rig.open_peers == 1)
            rig.messenger.detach()
            rig.device.close()
            rig.device = KVPool.create(LAYOUT, BLOCKS)
            rig.messenger.attach(rig.device)
            os.kill(frozen.process.pid, signal.SIGCONT)
            await until(lambda: number in rig.results)
            assert (rig.results[number].moved, rig.results[number].error) == (0, "another pool is attached")
            assert not rig.device.data.any()

    finish(main())


def test_it_ends_in_the_middle_of_everything(short_runs: None, before_copy: Any):
    async def main() -> None:
        async with Rig() as rig:
            peer, frozen = rig.serve(), rig.start("frozen")
            os.kill(frozen.process.pid, signal.SIGSTOP)
            begun = threading.Event()
            before_copy(lambda number: begun.set())
            rig.tell(frozen, [1], [1])
            for _ in range(20):
                rig.tell(peer, range(BLOCKS), range(BLOCKS))
            await until(begun.is_set)

    finish(main())


@pytest.mark.parametrize(
    "turns", [250, pytest.param(25_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=["1e3 pulls", "1e5 pulls"]
)
def test_many_pulls_of_coming_and_going_peers_leave_nothing(kind: str, turns: int):
    async def main() -> None:
        chance = random.Random(3)
        async with Rig(kind) as rig:
            served: list[Served] = [rig.serve(f"peer{number}", number) for number in range(4)]
            contents = {peer.incarnation: content(number, BLOCKS) for number, peer in enumerate(served)}
            moved = 0
            for turn in range(turns):  # each with pulls of several peers at once, into blocks of their own
                peer = served[chance.randrange(4)]
                if chance.random() < 0.1:
                    peer.replace(filled(turn, BLOCKS))
                    contents[peer.incarnation] = content(turn, BLOCKS)
                told = {}
                for place in range(0, BLOCKS, BLOCKS // 4):
                    peer, blocks = served[chance.randrange(4)], chance.sample(range(BLOCKS), chance.randrange(1, 8))
                    targets = list(range(place, place + len(blocks)))
                    told[rig.tell(peer, blocks, targets)] = (contents[peer.incarnation][blocks], targets)
                await until(lambda told=told: all(number in rig.results for number in told))
                for number, (expected, targets) in told.items():
                    whole = rig.results[number].moved
                    assert rig.has(targets[:whole], expected[:whole])
                    moved += whole
            assert moved > 8 * turns

    finish(main(), seconds=800)
