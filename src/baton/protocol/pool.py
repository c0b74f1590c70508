"""What passes over a descriptor socket or about what was passed there: sockets of siblings, and the KV pool.

A message on a descriptor socket carries exactly one descriptor (SCM_RIGHTS): PeerSocket and ReadersSocket that of a socket,
PoolReady that of the pool's memory. ReadPool, ReadRefused, ReadBlocks and BlocksFollow pass between the messengers of two
instances (kvcache/pool_server.py, kvcache/tcp_server.py). The others go over the control channel.
"""

from __future__ import annotations

from msgspec import Struct

from baton.protocol.ids import PoolIncarnation
from baton.protocol.numbers import Counter, Natural, Positive


class PeerSocket(Struct, frozen=True, array_like=True):
    """The socket that leads to another child of our parent, which was started (again)."""

    name: str


class PoolSized(Struct, frozen=True, array_like=True):
    """A worker that does not make the pool itself has found out how many blocks fit beside its weights."""

    blocks: Positive
    layout: bytes
    "KVLayout.encode(): what the blocks look like (kvpool/layout.py)."


class CreatePool(Struct, frozen=True, array_like=True):
    """To the cache service: make the pool, and announce it."""

    blocks: Positive
    layout: bytes = b""
    "As PoolSized says it. Empty: no worker has said it; it follows from the worker's settings."


class DeviceMemory(Struct, frozen=True, array_like=True):
    """A pool in the memory of a GPU, which the descriptor leads to. The memory has no header, so this says what lies in it."""

    layout: bytes
    "KVLayout.encode()."
    gpu: str = ""
    "UUID of the GPU: its number differs between processes."


class PoolReady(Struct, frozen=True, array_like=True):
    """The pool exists; its descriptor comes with this message. Its creator says it once, the engine passes it on."""

    fingerprint: bytes
    "Of the layout. An attacher that expects another one refuses the pool."
    incarnation: PoolIncarnation
    blocks: Positive
    memory: DeviceMemory | None = None
    "None: the pool is shared memory, which has a header of its own."
    capabilities: tuple[str, ...] = ()
    "As in ReadPool, of the process that answers one."


class HostPoolReady(Struct, frozen=True, array_like=True):
    """The memory of the host tier, with its descriptor. Whoever made it says it once; the engine keeps the descriptor and
    hands it to the next cache service, so that what was complete outlives the one before."""

    fingerprint: bytes
    incarnation: PoolIncarnation
    blocks: Positive


class ReadPool(Struct, frozen=True, array_like=True):
    """From one messenger to another: let me read that pool. The answer is PoolReady with a descriptor that cannot be written
    through, or ReadRefused. The connection stays; its end says that the pool is not to be read any more."""

    pool: PoolIncarnation
    fingerprint: bytes
    "Of the layout that the reader has."
    capabilities: tuple[str, ...] = ()
    "Optional features of the reader's build (protocol/versions.py)."


class ReadRefused(Struct, frozen=True, array_like=True):
    reason: str


class ReadBlocks(Struct, frozen=True, array_like=True):
    """Over a network: send these blocks of the pool that I was let in for. The answer is a BlocksFollow for each run, in this
    order, with its bytes behind it."""

    runs: tuple[tuple[Natural, Positive], ...]
    "First block and how many."


class BlocksFollow(Struct, frozen=True, array_like=True):
    """The bytes of a run come right behind this, as they are."""

    nbytes: Counter
    digest: bytes
    "Of these bytes (xxh3, 128 bits): what was damaged on its way is not used."


class ReadersSocket(Struct, frozen=True, array_like=True):
    """From the engine: messengers of other machines dial here. It listens, and outlives the cache service that serves it."""

    address: str = ""
    "Where it is, as others are told. Empty: nobody is told yet."


class PoolAttached(Struct, frozen=True, array_like=True):
    """The sender has mapped that pool, and verified layout and incarnation."""

    incarnation: PoolIncarnation


class DetachPool(Struct, frozen=True, array_like=True):
    """Unmap that pool, and do not touch it again: its memory is about to be given back."""

    incarnation: PoolIncarnation


class PoolDetached(Struct, frozen=True, array_like=True):
    """The sender has unmapped that pool (or never had it)."""

    incarnation: PoolIncarnation
