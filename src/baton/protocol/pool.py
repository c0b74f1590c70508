"""Messages on descriptor sockets, and messages about the KV pool.

A message on a descriptor socket carries exactly one descriptor (SCM_RIGHTS): PeerSocket and ReadersSocket that of a socket,
PoolReady that of the pool's memory. ReadPool, ReadRefused, ReadBlocks and BlocksFollow pass between the messengers of two
instances (kvcache/pool_server.py, kvcache/tcp_server.py). The others go over the control channel.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from baton.protocol.ids import PoolIncarnation
from baton.protocol.numbers import Counter, Natural, Positive

RANK_BITS: Final = 6


def set_incarnation(bits: int) -> PoolIncarnation:
    """The incarnation of a set of pools, which is that of rank 0's, from 57 random bits."""
    return PoolIncarnation(bits << RANK_BITS)


def of_rank(pool: PoolIncarnation, rank: int) -> PoolIncarnation:
    """The incarnation of a rank's pool. The core names all pools of a set by that of rank 0; no rank takes another one's pool
    for its own."""
    return PoolIncarnation(pool + rank)


class PeerSocket(Struct, frozen=True, array_like=True):
    """The socket to another child of our parent, which was started or restarted."""

    name: str


class PoolSized(Struct, frozen=True, array_like=True):
    """A worker that does not create the pool itself reports how many blocks fit beside its weights."""

    blocks: Positive
    layout: bytes
    "Layout of a block, KVLayout.encode() (kvpool/layout.py)."


class CreatePool(Struct, frozen=True, array_like=True):
    """Orders the cache service to create the pool, and to announce it."""

    blocks: Positive
    layout: bytes = b""
    "Layout, as in PoolSized. Empty: no worker has sent it; it follows from the worker's settings."
    incarnation: PoolIncarnation = PoolIncarnation(0)
    "Incarnation of rank 0's pool (`of_rank`). 0: a random one, for a single rank."


class DeviceMemory(Struct, frozen=True, array_like=True):
    """A pool in the memory of a GPU, shared by the descriptor. The memory has no header, so this message describes it."""

    layout: bytes
    "Layout, KVLayout.encode()."
    gpu: str = ""
    "UUID of the GPU: its number differs between processes."


class PoolReady(Struct, frozen=True, array_like=True):
    """The pool exists; its descriptor is sent with this message. Its creator sends it once, the engine forwards it."""

    fingerprint: bytes
    "Fingerprint of the layout. An attacher that expects another one refuses the pool."
    incarnation: PoolIncarnation
    blocks: Positive
    memory: DeviceMemory | None = None
    "Memory of a GPU. None: the pool is shared memory with its own header."
    capabilities: tuple[str, ...] = ()
    "Capabilities, as in ReadPool, of the process that answers one."
    name: str = ""
    "Name of the instance that answers a ReadPool over a network."
    keyed: str = ""
    "Algorithm of keyed digests, chosen from `ReadPool.digests`. Empty: `ReadPool.keyed`."


class HostPoolReady(Struct, frozen=True, array_like=True):
    """The memory of the host tier, with its descriptor. Its creator sends it once; the engine keeps the descriptor and sends it
    to the next cache service, so that complete blocks outlive a service."""

    fingerprint: bytes
    incarnation: PoolIncarnation
    blocks: Positive


class ReadPool(Struct, frozen=True, array_like=True):
    """A messenger's request to read the pool of another one. The answer is PoolReady with a read-only descriptor, or
    ReadRefused. The connection stays open; when it ends, the pool must not be read any more."""

    pool: PoolIncarnation
    fingerprint: bytes
    "Fingerprint of the reader's layout."
    capabilities: tuple[str, ...] = ()
    "Optional features of the reader's build (protocol/versions.py)."
    name: str = ""
    "Name of the reader's instance. Empty: unknown, or on this machine."
    keyed: str = ""
    "Algorithm of keyed digests (kvcache/digests.py) that the reader wants of a peer with the capability. Empty: checksums."
    digests: tuple[str, ...] = ()
    "Algorithms of keyed digests that the reader has, the best first. A peer that knows this field chooses one."


class ReadRefused(Struct, frozen=True, array_like=True):
    reason: str


class ReadBlocks(Struct, frozen=True, array_like=True):
    """Requests blocks of the opened pool over a network. The answer is a BlocksFollow for each piece, in this order, followed
    by its bytes."""

    runs: tuple[tuple[Natural, Positive], ...]
    "Runs of blocks: first block, number of blocks."
    pieces: tuple[Positive, ...] = ()
    "Number of runs in each piece; sent to peers with the capability. Empty: each run is a piece."


class BlocksFollow(Struct, frozen=True, array_like=True):
    """The raw bytes of a piece follow this message."""

    nbytes: Counter
    digest: bytes
    "Digest of these bytes (kvcache/digests.py): damaged bytes are not used."


class ReadersSocket(Struct, frozen=True, array_like=True):
    """The socket that messengers of other machines dial, sent by the engine. It listens, and outlives the cache service that
    serves it."""

    address: str = ""
    "Announced address. Empty: not announced yet."


class PoolAttached(Struct, frozen=True, array_like=True):
    """The sender has mapped that pool, and verified layout and incarnation."""

    incarnation: PoolIncarnation


class DetachPool(Struct, frozen=True, array_like=True):
    """Orders to unmap that pool and not to touch it again: its memory is about to be freed."""

    incarnation: PoolIncarnation


class PoolDetached(Struct, frozen=True, array_like=True):
    """The sender has unmapped that pool (or never had it)."""

    incarnation: PoolIncarnation
