"""A messenger on this loop that pulls, and peers for it to pull from: on this loop too, or processes of their own."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from messenger_peer import LAYOUT, SECRET, filled, serving

from baton.config import WireConfig
from baton.kvcache.messenger import Messenger
from baton.kvcache.shared_memory import SharedMemory
from baton.kvcache.tcp import Tcp
from baton.kvpool.pool import KVPool
from baton.protocol.ids import MoveId, PoolIncarnation
from baton.protocol.moves import BlockMove, MoveResult

HERE = Path(__file__).parent
BLOCKS = 64


def mapped() -> int:
    """How many KV pools this process has mapped."""
    return sum("memfd:baton-kv" in line for line in Path("/proc/self/maps").read_text().splitlines())


def finish(work: Coroutine[Any, Any, None], seconds: float = 60) -> None:
    asyncio.run(asyncio.wait_for(work, seconds))


async def until(question: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not question():
            await asyncio.sleep(0.005)


class Served:
    """A pool that can be read, served by this process."""

    def __init__(self, address: str, seed: int, pool: KVPool | None = None, wire: WireConfig | None = None) -> None:
        self.address = address
        self.transport = serving(address, wire)
        self.pool = filled(seed, BLOCKS) if pool is None else pool
        self.transport.attach(self.pool)

    @property
    def incarnation(self) -> PoolIncarnation:
        return self.pool.incarnation

    def replace(self, pool: KVPool) -> None:
        self.transport.detach()
        self.pool.close()
        self.pool = pool
        self.transport.attach(pool)

    def close(self) -> None:
        self.transport.close()
        self.pool.close()


class Remote:
    """A pool that can be read, served by a process of its own."""

    def __init__(self, address: str, seed: int, blocks: int = BLOCKS) -> None:
        self.address = address
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "messenger_peer.py"), address, str(seed), str(blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.incarnation = PoolIncarnation(int(self.process.stdout.readline()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Rig:
    """`async with`: afterwards nothing is mapped or open that was not before. `kind`: of the peers' addresses."""

    def __init__(self, kind: str = "unix", **wire: Any) -> None:
        self._kind = kind
        self.wire = WireConfig(**wire)
        self._ports: dict[str, int] = {}
        self.maps = kind == "unix"
        "Whether a peer that is open is mapped."

    async def __aenter__(self) -> Rig:
        self._folder = tempfile.TemporaryDirectory()
        self._maps = mapped()
        self.results: dict[int, MoveResult] = {}
        self.peers: list[Served | Remote] = []
        self.messenger = Messenger({"unix": SharedMemory(), "tcp": Tcp(SECRET)}, self._report, self.wire)
        self.device = KVPool.create(LAYOUT, BLOCKS)
        self.messenger.attach(self.device)
        self._ids = itertools.count(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.messenger.close()
        for peer in self.peers:
            peer.close()
        if self.device is not None:
            self.device.close()
        await until(lambda: mapped() == self._maps)
        assert [name for name in Path(self._folder.name).iterdir() if name.name not in self._killed()] == []
        self._folder.cleanup()

    def _killed(self) -> list[str]:
        """A process that was killed leaves its socket: its folder's owner removes it."""
        return [Path(peer.address).name for peer in self.peers if isinstance(peer, Remote)]

    def address(self, name: str) -> str:
        if self._kind == "unix":
            return f"unix:{self._folder.name}/{name}.sock"
        if name not in self._ports:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self._ports[name] = free.getsockname()[1]
        return f"tcp://127.0.0.1:{self._ports[name]}"

    def serve(self, name: str = "peer", seed: int = 1, pool: KVPool | None = None) -> Served:
        self.peers.append(served := Served(self.address(name), seed, pool, self.wire))
        return served

    def start(self, name: str = "remote", seed: int = 1) -> Remote:
        self.peers.append(remote := Remote(self.address(name), seed))
        return remote

    def _report(self, result: MoveResult) -> None:
        assert result.id not in self.results, "one result a move"
        self.results[result.id] = result

    def tell(self, whom: Served | Remote, sources: Sequence[int], targets: Sequence[int], **changes: Any) -> int:
        move = BlockMove(
            MoveId(next(self._ids)),
            "pull",
            (),
            tuple(targets),
            self.device.incarnation,
            seconds_max=20.0,
            peer=whom.address,
            peer_pool=whom.incarnation,
            peer_blocks=tuple(sources),
        )
        values = {name: getattr(move, name) for name in move.__struct_fields__} | changes
        self.messenger.submit(BlockMove(**values))
        return move.id

    async def pull(self, whom: Served | Remote, sources: Sequence[int], targets: Sequence[int], **changes: Any) -> MoveResult:
        number = self.tell(whom, sources, targets, **changes)
        await until(lambda: number in self.results)
        return self.results[number]

    @property
    def open_peers(self) -> int:
        return len(self.messenger._peers)

    def has(self, targets: Sequence[int], expected: np.ndarray) -> bool:
        return bool(np.array_equal(self.device.data[list(targets)], expected))
