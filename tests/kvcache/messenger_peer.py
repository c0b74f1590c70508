"""A peer of its own process: a pool with known bytes and a server that lets it be read. Says `INCARNATION` when it serves.

python messenger_peer.py ADDRESS SEED BLOCKS        serves until its standard input ends
"""

from __future__ import annotations

import asyncio
import socket
import sys

import numpy as np

from baton.addresses import parse_address
from baton.config import WireConfig
from baton.kvcache.shared_memory import SharedMemory
from baton.kvcache.tcp import Tcp
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool
from baton.trust.secret import Secret

SECRET = Secret(b"of the messengers of these tests, all of them")
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="float32")


def filled(seed: int, blocks: int, layout: KVLayout = LAYOUT) -> KVPool:
    pool = KVPool.create(layout, blocks)
    pool.data[:] = content(seed, blocks, layout)
    return pool


def content(seed: int, blocks: int, layout: KVLayout = LAYOUT) -> np.ndarray:
    numbers = np.random.default_rng(seed).integers(0, 2**20, (blocks, layout.block_numbers))
    return numbers.astype(np.float32)


def serving(address: str, wire: WireConfig | None = None) -> SharedMemory | Tcp:
    """A transport that lets others read what is attached to it."""
    if address.startswith("unix:"):
        return SharedMemory(address, wire)
    tcp, place = Tcp(SECRET, address, wire), parse_address(address)
    tcp.listen(socket.create_server((place.host, place.port)))
    return tcp


async def serve(address: str, seed: int, blocks: int) -> None:
    transport, pool = serving(address), filled(seed, blocks)
    transport.attach(pool)
    print(pool.incarnation, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
