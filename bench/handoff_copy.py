"""What a pull of KV blocks costs beside memcpy of the same bytes. The goal: at least half of memcpy's throughput.

    python bench/handoff_copy.py [--tokens 1000] [--dtype int8] [--rounds 100] [--json]

The peer is a process of its own with a pool of the default model's layout (SmolLM2, 16 tokens a block); the messenger that
pulls is this process's. Rounds go through the whole pool, so that the bytes do not come from the processor's caches, and every
round has one turn of each way, in an order that is drawn; a figure is the median over the rounds, and so is the ratio, which
is taken within a round.

    memcpy       numpy's copy between two arrays of this process, as large as the pools and touched before
    in a thread  the same, ordered from an event loop and done by a thread. Where the cores are busy most of what a pull takes
                 longer is this: it waits for a core, and so does its result
    adjacent     a pull of blocks that lie side by side: from the order to the result ("end to end"), and the copying alone
    scattered    a pull of blocks that lie anywhere, in both pools
    first touch  adjacent, of blocks that this process has not read or written since it mapped the pools
    TCP          as many bytes over a connection of this machine, by the system calls alone: both processes copy, so a network
                 of another machine can be faster than this
    network      a pull as from another machine: adjacent, over TCP, every piece verified
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from baton.kvcache.messenger import Messenger
from baton.kvcache.shared_memory import SharedMemory
from baton.kvcache.tcp import Tcp
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool
from baton.protocol.ids import BlockId, MoveId, PoolIncarnation
from baton.protocol.moves import BlockMove, MoveResult
from baton.trust.secret import Secret

POOL_BYTES = 256 << 20
GOAL = 0.5
SECRET = Secret(b"known to both processes of this benchmark")


def layout_of(dtype: str) -> KVLayout:
    form = "int8-fours" if dtype == "int8" else "turned"
    return KVLayout(layers=30, kv_heads=3, head_dim=64, block_size=16, dtype=dtype, format=form)  # type: ignore[arg-type]


async def serve(address: str, dtype: str, blocks: int) -> None:
    """The peer. Says its pool and its ports: of the network, and of a server that sends as many bytes as it is asked for."""
    pool, near, far = KVPool.create(layout_of(dtype), blocks), SharedMemory(address), Tcp(SECRET)
    pool.data[:] = np.arange(blocks, dtype=np.int64).astype(pool.data.dtype)[:, None]
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [listener.getsockname()[1] for listener in listeners]
    far.listen(listeners[0])
    threading.Thread(target=send_plain, args=(listeners[1], pool.data.nbytes), daemon=True).start()
    for transport in (near, far):
        transport.attach(pool)
    print(pool.incarnation, *ports, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def send_plain(listener: socket.socket, most: int) -> None:
    sock, _ = listener.accept()
    content = memoryview(bytes(most))
    while asked := sock.recv(8):
        sock.sendall(content[: int.from_bytes(asked, "big")])


class Puller:
    def __init__(self, address: str, peer_pool: int, device: KVPool) -> None:
        self._results: asyncio.Queue[MoveResult] = asyncio.Queue()
        self._messenger = Messenger({"unix": SharedMemory(), "tcp": Tcp(SECRET)}, self._results.put_nowait)
        self._messenger.attach(device)
        self._address, self._peer_pool, self._device = address, PoolIncarnation(peer_pool), device

    async def pull(self, sources: list[int], targets: list[int], address: str = "") -> tuple[float, float]:
        """Seconds from order to result, and of the copying."""
        move = BlockMove(
            MoveId(1),
            "pull",
            (),
            tuple(map(BlockId, targets)),
            self._device.incarnation,
            seconds_max=10.0,
            peer=address or self._address,
            peer_pool=self._peer_pool,
            peer_blocks=tuple(map(BlockId, sources)),
        )
        begun = perf_counter()
        self._messenger.submit(move)
        result = await self._results.get()
        seconds = perf_counter() - begun
        if result.moved != len(sources):
            sys.exit(f"the pull failed: {result.error}")
        return seconds, result.seconds

    def close(self) -> None:
        self._messenger.close()


class Ways:
    """Each copies `wanted` blocks from one place to another and says what it took, by name."""

    def __init__(self, puller: Puller, layout: KVLayout, blocks: int, wanted: int, ports: list[int]) -> None:
        self._puller, self._blocks, self._wanted = puller, blocks, wanted
        self._network = f"tcp://127.0.0.1:{ports[0]}"
        self._plain = socket.create_connection(("127.0.0.1", ports[1]))
        self._source, self._target = (np.ones((blocks, layout.block_bytes), np.uint8) for _ in range(2))
        self._thread, self._chance = ThreadPoolExecutor(1), random.Random(1)
        self.seconds: dict[str, list[float]] = {}

    def note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    async def memcpy(self, place: int, other: int) -> None:
        begun = perf_counter()
        np.copyto(self._target[other : other + self._wanted], self._source[place : place + self._wanted])
        self.note("memcpy", perf_counter() - begun)

    async def memcpy_in_a_thread(self, place: int, other: int) -> None:
        target, source = self._target[other : other + self._wanted], self._source[place : place + self._wanted]
        begun = perf_counter()
        await asyncio.get_running_loop().run_in_executor(self._thread, np.copyto, target, source)
        self.note("memcpy in a thread", perf_counter() - begun)

    async def adjacent(self, place: int, other: int) -> None:
        sources, targets = range(place, place + self._wanted), range(other, other + self._wanted)
        end_to_end, copying = await self._puller.pull(list(sources), list(targets))
        self.note("adjacent", end_to_end)
        self.note("adjacent, copying alone", copying)

    async def scattered(self, place: int, other: int) -> None:
        sources, targets = (self._chance.sample(range(self._blocks), self._wanted) for _ in range(2))
        end_to_end, _ = await self._puller.pull(sources, targets)
        self.note("scattered", end_to_end)

    async def tcp(self, place: int, other: int) -> None:
        target = memoryview(self._target[other : other + self._wanted]).cast("B")
        begun = perf_counter()
        self._plain.sendall(len(target).to_bytes(8, "big"))
        while target:
            target = target[self._plain.recv_into(target) :]
        self.note("TCP", perf_counter() - begun)

    async def network(self, place: int, other: int) -> None:
        sources, targets = range(place, place + self._wanted), range(other, other + self._wanted)
        end_to_end, _ = await self._puller.pull(list(sources), list(targets), self._network)
        self.note("network", end_to_end)

    async def first_touch(self, place: int) -> None:
        run = list(range(place, place + self._wanted))
        end_to_end, _ = await self._puller.pull(run, run)
        self.note("first touch", end_to_end)

    def close(self) -> None:
        self._thread.shutdown()
        self._plain.close()


async def measure(arguments: argparse.Namespace, address: str, peer: str, blocks: int) -> dict[str, list[float]]:
    peer_pool, *ports = map(int, peer.split())
    layout = layout_of(arguments.dtype)
    wanted = -(-arguments.tokens // layout.block_size)
    device = KVPool.create(layout, blocks)
    puller = Puller(address, peer_pool, device)
    ways = Ways(puller, layout, blocks, wanted, ports)
    places, chance = list(range(0, blocks - wanted, wanted)), random.Random(2)
    await puller.pull([blocks - 1], [blocks - 1])  # opened and mapped; the blocks that are measured are not touched
    for place in places:
        await ways.first_touch(place)
    for turn in range(arguments.rounds):
        order = [ways.memcpy, ways.memcpy_in_a_thread, ways.adjacent, ways.scattered, ways.tcp, ways.network]
        chance.shuffle(order)  # who comes after a long copy of this thread waits for a core
        for way in order:
            await way(places[turn % len(places)], places[(turn + len(places) // 2) % len(places)])
    puller.close()
    ways.close()
    device.close()
    return ways.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--dtype", default="int8", choices=["int8", "float16", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    layout = layout_of(arguments.dtype)
    if arguments.serve:
        asyncio.run(serve(arguments.serve[0], arguments.dtype, int(arguments.serve[1])))
        return
    wanted = -(-arguments.tokens // layout.block_size)
    blocks = max(POOL_BYTES // layout.block_bytes, 4 * wanted)
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/peer.sock"
        command = [sys.executable, str(Path(__file__)), "--dtype", arguments.dtype, "--serve", address, str(blocks)]
        peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert peer.stdout is not None
        try:
            seconds = asyncio.run(measure(arguments, address, peer.stdout.readline().decode(), blocks))
        finally:
            peer.kill()
            peer.wait()
    moved = wanted * layout.block_bytes
    rows = {}
    for name, taken in seconds.items():
        plain = seconds["memcpy"] if len(taken) == len(seconds["memcpy"]) else [median(seconds["memcpy"])] * len(taken)
        ratio = median(memcpy / other for memcpy, other in zip(plain, taken, strict=True))
        rows[name] = {"milliseconds": median(taken) * 1e3, "gib_per_second": moved / median(taken) / 2**30, "of_memcpy": ratio}
    if arguments.json:
        print(json.dumps({"tokens": arguments.tokens, "bytes": moved, "rows": rows}))
        return
    print(f"{arguments.tokens} tokens: {wanted} blocks of {layout.block_bytes / 1024:.0f} KiB, {moved / 2**20:.1f} MiB")
    for name, row in rows.items():
        print(f"{name:26}{row['milliseconds']:8.2f} ms {row['gib_per_second']:7.2f} GiB/s {row['of_memcpy']:6.0%} of memcpy")
    copying, whole = rows["adjacent, copying alone"]["of_memcpy"], rows["adjacent"]["of_memcpy"]
    print(f"goal {GOAL:.0%} of memcpy: copying {verdict(copying)}, from the order to the result {verdict(whole)}", end="")
    print(f", where memcpy in a thread has {rows['memcpy in a thread']['of_memcpy']:.0%}")
    of_tcp = median(plain / pull for plain, pull in zip(seconds["TCP"], seconds["network"], strict=True))
    print(f"from another machine: {of_tcp:.0%} of plain TCP")


def verdict(ratio: float) -> str:
    return f"{'reached' if ratio >= GOAL else 'MISSED'} ({ratio:.0%})"


if __name__ == "__main__":
    main()
