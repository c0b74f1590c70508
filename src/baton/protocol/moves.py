"""Block moves between tiers: core and kvcache share these messages and nothing else.

    store    device  -> host        a computed block is copied
    load     host    -> device      for a sequence that waits for it
    put      host    -> storage
    fetch    storage -> host
    pull     another instance's device -> device      a hand-off (protocol/handoff.py)

The core decides and keeps the state (core/kv/tiers.py); the cache service copies by order, and reports how far it got. Slow
tiers access host blocks only. A move knows nothing of steps: it is sent when no plan writes to its targets any more.

Blocks are named by key. Only if the storage backend finds them by token ids (CacheHello.wants_tokens), queries, puts and
fetches carry those too, packed: all from the start of the sequence to the end of the last key's block. Their keys form one
chain then.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack, unpack
from typing import Literal

from msgspec import Struct

from baton.protocol.ids import BlockId, BlockKey, HostBlockId, MoveId, PoolIncarnation

MoveKind = Literal["store", "load", "put", "fetch", "pull"]


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Token ids in four bytes each, little-endian: a long prefix is one value of a message, not one per token."""
    return pack(f"<{len(ids)}I", *ids)


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return unpack(f"<{len(packed) // 4}I", packed)


class BlockMove(Struct, frozen=True, array_like=True):
    """Copy these blocks, in this order: a leading run of them is useful even if the rest fails."""

    id: MoveId
    kind: MoveKind
    host: tuple[HostBlockId, ...]
    device: tuple[BlockId, ...] = ()
    "Blocks of the device. Store and load: one for each host block. Pull: one for each of the peer's."
    pool: PoolIncarnation = PoolIncarnation(0)
    "Pool of the device blocks: a service that is attached to another pool copies nothing."
    keys: tuple[BlockKey, ...] = ()
    "Keys of the blocks. Put and fetch: one for each host block."
    seconds_max: float = 0.0
    "Time limit of a put, fetch or pull. Blocks not moved by then are not moved."
    peer: str = ""
    "Addresses of the messenger that serves the other pool (instance.py), for a pull; in the core a line for each rank."
    peer_pool: PoolIncarnation = PoolIncarnation(0)
    peer_blocks: tuple[BlockId, ...] = ()
    tokens: bytes = b""
    "Tokens of a put or fetch, if storage wants them: `pack_tokens` of the whole prefix up to the last key."


class MoveResult(Struct, frozen=True, array_like=True):
    """The result of a move, exactly one per move. `moved` counts the leading blocks that arrived complete."""

    id: MoveId
    moved: int
    seconds: float = 0.0
    "Seconds of the copying, without the wait for its turn."
    error: str | None = None
    "Error of the tier. A missing block is no failure."


class StorageIdentity(Struct, frozen=True, array_like=True):
    """Identity of the blocks of the following queries and moves (worker/identity.py): storage labels them with it."""

    identity: bytes


class StorageQuery(Struct, frozen=True, array_like=True):
    """Asks storage how many of these leading keys it has."""

    id: MoveId
    keys: tuple[BlockKey, ...]
    seconds_max: float = 0.0
    tokens: bytes = b""
    "Tokens, if storage wants them, as in BlockMove."


class StorageAnswer(Struct, frozen=True, array_like=True):
    id: MoveId
    found: int
    error: str | None = None
