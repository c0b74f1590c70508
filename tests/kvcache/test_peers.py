"""Which pools of others are open: by whom they are asked for, when they are closed, and that none is forgotten."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from messenger_rig import finish, until
from storage_rig import soon

from baton.config import WireConfig
from baton.errors import PeerUnreadable
from baton.kvcache.peers import PeerKey, Peers
from baton.kvcache.shared_memory import MappedPool
from baton.kvcache.storage.backend import Deadline
from baton.protocol.ids import PoolIncarnation


def key(number: int, address: str = "fake:one") -> PeerKey:
    return address, PoolIncarnation(number)


class FakePool:
    def __init__(self, on_lost: Callable[[], None]) -> None:
        self.on_lost = on_lost
        self.closed = False

    def close(self) -> None:
        assert not self.closed, "twice"
        self.closed = True


class FakeTransport:
    """Every pool that it has opened is in `pools`. `gate`: opening waits for it. `at_once`: what happens before it is open."""

    def __init__(self) -> None:
        self.pools: list[FakePool] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.at_once: Callable[[FakePool], None] = lambda pool: None

    async def open(self, address: str, pool: PoolIncarnation, fingerprint: bytes, on_lost: Callable[[], None]) -> Any:
        await self.gate.wait()
        made = FakePool(on_lost)
        self.pools.append(made)
        self.at_once(made)
        return made


def rig(**wire: Any) -> tuple[FakeTransport, Peers]:
    transport = FakeTransport()
    return transport, Peers({"fake": transport}, WireConfig(**wire))  # type: ignore[dict-item]


def test_another_pool_of_the_same_address_closes_the_old_one_and_no_other():
    """The peer was started again, and its death was not seen yet: what it had would stay mapped for a minute."""

    async def main() -> None:
        transport, peers = rig()
        for asked in (key(1), key(2, "fake:two"), key(3)):
            await peers.opened(asked, b"", soon())
        assert [pool.closed for pool in transport.pools] == [True, False, False]
        assert await peers.opened(key(3), b"", soon()) is transport.pools[2]
        peers.close_all()
        assert all(pool.closed for pool in transport.pools)

    finish(main())


@pytest.mark.parametrize("turns", range(4))
def test_one_that_is_lost_as_it_is_opened_is_closed_and_not_read(turns: int):
    """So many turns of the loop after it was opened; whoever waits for it is woken two turns after."""

    async def main() -> None:
        transport, peers = rig()
        loop = asyncio.get_running_loop()

        def lose(pool: FakePool, left: int) -> None:
            loop.call_soon(lose, pool, left - 1) if left else pool.on_lost()

        transport.at_once = lambda pool: lose(pool, turns)
        if turns == 3:
            assert await peers.opened(key(1), b"", soon()) is transport.pools[0]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert ([pool.closed for pool in transport.pools], len(peers)) == ([True], 0)
            return
        with pytest.raises(PeerUnreadable, match="lost at once"):
            await peers.opened(key(1), b"", soon())
        assert ([pool.closed for pool in transport.pools], len(peers)) == ([True], 0)

    finish(main())


def test_the_end_of_an_earlier_connection_does_not_close_the_present_one():
    async def main() -> None:
        transport, peers = rig()
        await peers.opened(key(1), b"", soon())
        peers.close(key(1))
        await peers.opened(key(1), b"", soon())
        transport.pools[0].on_lost()
        assert [pool.closed for pool in transport.pools] == [True, False]
        transport.pools[1].on_lost()
        assert [pool.closed for pool in transport.pools] == [True, True]

    finish(main())


def test_the_one_used_longest_ago_goes_and_not_the_one_opened_first():
    async def main() -> None:
        transport, peers = rig(peers_max=2)
        for name in ("one", "two", "one", "three"):
            await peers.opened(key(1, f"fake:{name}"), b"", soon())
            assert len(peers) <= 2
        assert [pool.closed for pool in transport.pools] == [False, True, False]
        peers.close_all()

    finish(main())


def test_whoever_comes_when_all_places_are_being_opened_is_told():
    async def main() -> None:
        transport, peers = rig(peers_max=1)
        transport.gate.clear()
        first = asyncio.ensure_future(peers.opened(key(1), b"", soon()))
        await asyncio.sleep(0)
        with pytest.raises(PeerUnreadable, match="being opened already"):
            await peers.opened(key(1, "fake:two"), b"", soon())
        transport.gate.set()
        await first
        peers.close_all()

    finish(main())


def test_a_use_begins_the_idle_time_anew():
    async def main() -> None:
        transport, peers = rig()
        timers: list[tuple[float, list[str]]] = []

        def call_later(seconds: float, close: Any, *arguments: Any) -> Any:
            timers.append((seconds, []))
            return SimpleNamespace(cancel=lambda said=timers[-1][1]: said.append("cancelled"))

        peers._loop = SimpleNamespace(call_later=call_later)  # type: ignore[assignment]
        for _ in range(3):
            await peers.opened(key(1), b"", soon())
        assert all(seconds == WireConfig().peer_idle_seconds for seconds, _ in timers)
        assert [bool(cancelled) for _, cancelled in timers] == [True] * (len(timers) - 1) + [False]
        assert len(timers) >= 3
        peers.close_all()
        assert timers[-1][1] == ["cancelled"]
        assert transport.pools[0].closed

    finish(main())


def test_a_pool_is_unmapped_when_no_copy_reads_it_any_more():
    async def main() -> None:
        copier, begun, go_on = ThreadPoolExecutor(1), Event(), Event()
        copying = copier.submit(lambda: (begun.set(), go_on.wait(20)))
        assert begun.wait(20)
        ours, theirs = socket.socketpair()
        closed: list[bool] = []
        layout = SimpleNamespace(fingerprint=lambda: b"")
        pool: Any = SimpleNamespace(blocks=1, layout=layout, close=lambda: closed.append(copying.done()))
        MappedPool(pool, ours, copier, lambda: None).close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closed
        go_on.set()
        await until(lambda: bool(closed))
        assert closed == [True]
        copier.shutdown()
        theirs.close()

    finish(main())


def test_whoever_has_no_time_left_does_not_wait_and_the_next_one_finds_it_open():
    async def main() -> None:
        transport, peers = rig()
        transport.gate.clear()
        with pytest.raises(PeerUnreadable, match="does not answer in time"):
            await asyncio.wait_for(peers.opened(key(1), b"", Deadline.after(0.0)), 20)
        transport.gate.set()
        await peers.opened(key(1), b"", soon())
        assert len(transport.pools) == 1
        peers.close_all()

    finish(main())


def test_one_that_could_not_be_opened_is_tried_again():
    async def main() -> None:
        transport, peers = rig()

        def fails(pool: FakePool) -> None:
            raise PeerUnreadable("no")

        transport.at_once = fails
        with pytest.raises(PeerUnreadable, match="no"):
            await peers.opened(key(1), b"", soon())
        await asyncio.sleep(0)
        assert len(peers) == 0
        transport.at_once = lambda pool: None
        assert await peers.opened(key(1), b"", soon()) is transport.pools[1]
        peers.close_all()

    finish(main())
