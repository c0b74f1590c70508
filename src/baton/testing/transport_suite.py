"""One contract for every transport (kvcache/transport.py): the right bytes of the right pool, or PeerUnreadable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.errors import PeerUnreadable
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.transport import Transport
from baton.kvpool.copies import CopySpan
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool
from baton.protocol.ids import PoolIncarnation

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="float32")
BLOCKS = 16
SECONDS_MAX = 30.0
"""Seconds that guard against hanging, never a measure."""


def finish(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, SECONDS_MAX))


async def until(question: Callable[[], bool]) -> None:
    while not question():
        await asyncio.sleep(0.005)


class TransportConformance:
    """Tests of a transport. Subclass it in a test file, and create both sides. Pools are in shared memory."""

    def serving(self, folder: Path) -> Transport:
        """A listening transport: peers read the pools attached to it. Called on the loop."""
        raise NotImplementedError

    def reading(self) -> Transport:
        """A transport that only reads."""
        raise NotImplementedError

    @asynccontextmanager
    async def both(self, folder: Path) -> AsyncIterator[tuple[Transport, KVPool, Transport, KVPool]]:
        """The serving side and its pool, which has known numbers; the reading side and its pool, which is empty."""
        server, reader = self.serving(folder), self.reading()
        theirs, ours = KVPool.create(LAYOUT, BLOCKS), KVPool.create(LAYOUT, BLOCKS)
        theirs.data[:] = np.arange(theirs.data.size, dtype=np.float32).reshape(theirs.data.shape) + 1
        server.attach(theirs)
        reader.attach(ours)
        try:
            yield server, theirs, reader, ours
        finally:
            for transport, pool in ((reader, ours), (server, theirs)):
                transport.detach()
                transport.close()
                pool.close()

    def test_runs_arrive_where_they_belong_and_nothing_else_is_written(self, tmp_path: Path) -> None:
        async def main() -> None:
            async with self.both(tmp_path) as (server, theirs, reader, ours):
                peer = await reader.open(server.address, theirs.incarnation, LAYOUT.fingerprint(), lambda: None)
                assert (peer.blocks, peer.fingerprint) == (BLOCKS, LAYOUT.fingerprint())
                runs = [CopySpan(5, 10, 3), CopySpan(0, 2, 1)]
                read = await peer.read(runs, ours, Deadline.after(SECONDS_MAX), lambda: True)
                assert read.blocks == 4
                assert np.array_equal(ours.data[[10, 11, 12, 2]], theirs.data[[5, 6, 7, 0]])
                assert not ours.data[[block for block in range(BLOCKS) if block not in (10, 11, 12, 2)]].any()
                peer.close()

        finish(main())

    def test_another_pool_or_layout_than_asked_for_is_not_opened(self, tmp_path: Path) -> None:
        async def main() -> None:
            async with self.both(tmp_path) as (server, theirs, reader, _):
                other = PoolIncarnation(theirs.incarnation ^ 1)
                for pool, fingerprint in ((other, LAYOUT.fingerprint()), (theirs.incarnation, bytes(32))):
                    with pytest.raises(PeerUnreadable):
                        await reader.open(server.address, pool, fingerprint, lambda: None)

        finish(main())

    def test_a_read_that_may_not_go_on_writes_nothing(self, tmp_path: Path) -> None:
        async def main() -> None:
            async with self.both(tmp_path) as (server, theirs, reader, ours):
                peer = await reader.open(server.address, theirs.incarnation, LAYOUT.fingerprint(), lambda: None)
                try:
                    read = await peer.read([CopySpan(0, 0, BLOCKS)], ours, Deadline.after(SECONDS_MAX), lambda: False)
                    whole = read.blocks
                except PeerUnreadable:
                    whole = 0
                assert whole == 0
                assert not ours.data.any()
                peer.close()

        finish(main())

    @pytest.mark.parametrize("end", ["deadline", "may not go on", "detach"])
    def test_a_read_that_was_given_up_writes_nothing_afterwards(self, tmp_path: Path, end: str) -> None:
        """Reads are given up at various moments; the blocks then belong to other requests."""

        async def main() -> None:
            async with self.both(tmp_path) as (server, theirs, reader, ours):
                for turn in range(12):
                    going_on = True
                    peer = await reader.open(server.address, theirs.incarnation, LAYOUT.fingerprint(), lambda: None)
                    runs = [CopySpan(block, block, 1) for block in range(BLOCKS)] * 50
                    deadline = Deadline.after(0.0002 * turn if end == "deadline" else SECONDS_MAX)
                    reading = asyncio.create_task(peer.read(runs, ours, deadline, lambda: going_on))  # noqa: B023
                    await asyncio.sleep(0.0002 * turn)
                    if end != "deadline":
                        going_on = False
                    if end == "detach":
                        reader.detach()
                        ours.data[:] = 0
                    await asyncio.wait([reading])
                    reading.exception()
                    if end != "detach":
                        ours.data[:] = 0
                    await asyncio.sleep(0.005)
                    assert not ours.data.any()
                    peer.close()
                    if end == "detach":
                        reader.attach(ours)

        finish(main())

    def test_a_reader_learns_once_that_the_pool_is_gone(self, tmp_path: Path) -> None:
        async def main() -> None:
            async with self.both(tmp_path) as (server, theirs, reader, _):
                lost: list[int] = []
                peer = await reader.open(server.address, theirs.incarnation, LAYOUT.fingerprint(), lambda: lost.append(1))
                server.detach()
                await until(lambda: bool(lost))
                await asyncio.sleep(0.05)
                assert lost == [1]
                peer.close()
                with pytest.raises(PeerUnreadable):
                    await reader.open(server.address, theirs.incarnation, LAYOUT.fingerprint(), lambda: None)

        finish(main())
