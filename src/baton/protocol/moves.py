"""Block moves between tiers: core and kvcache share these messages and nothing else.

    store    device  -> host        a computed block is copied
    load     host    -> device      for a sequence that waits for it
    put      host    -> storage
    fetch    storage -> host
    pull     another instance's device -> device      a hand-off (protocol/handoff.py)

The core decides and keeps the books (core/kv/tiers.py); the cache service copies what it is told, and says how far it got. Slow
tiers touch host blocks only. Nothing about steps is in a move: it is sent when nobody writes to its targets any more.

Blocks are named by key. Only where the storage backend finds them by token ids (CacheHello.wants_tokens), questions, puts and
fetches carry those too, packed: all from the start of the sequence to the end of the last key's block. Their keys follow each
other in one chain then.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack, unpack
from typing import Literal

from msgspec import Struct

from baton.protocol.ids import BlockId, BlockKey, HostBlockId, MoveId, PoolIncarnation

MoveKind = Literal["store", "load", "put", "fetch", "pull"]


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Four bytes each, little-endian: a long prefix is one value of a message, and not one for each token."""
    return pack(f"<{len(ids)}I", *ids)


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return unpack(f"<{len(packed) // 4}I", packed)


class BlockMove(Struct, frozen=True, array_like=True):
    """Copy these blocks, in this order: a leading run of them is useful even if the rest fails."""

    id: MoveId
    kind: MoveKind
    host: tuple[HostBlockId, ...]
    device: tuple[BlockId, ...] = ()
    "With store and load, one for each host block. With pull, one for each of the peer's."
    pool: PoolIncarnation = PoolIncarnation(0)
    "Of those device blocks: a service that is attached to another pool copies nothing."
    keys: tuple[BlockKey, ...] = ()
    "With put and fetch, one for each host block."
    seconds_max: float = 0.0
    "With put, fetch and pull: how long it may take. What is not moved by then is not moved."
    peer: str = ""
    "With pull: the addresses of the messenger that lets the other pool be read (node.py)."
    peer_pool: PoolIncarnation = PoolIncarnation(0)
    peer_blocks: tuple[BlockId, ...] = ()
    tokens: bytes = b""
    "With put and fetch, where storage wants them: `pack_tokens` of the whole prefix up to the last key."


class MoveResult(Struct, frozen=True, array_like=True):
    """Exactly one a move. `moved` counts the leading blocks that arrived whole."""

    id: MoveId
    moved: int
    seconds: float = 0.0
    "How long the copying took, without any waiting for its turn."
    error: str | None = None
    "The tier failed. That it does not have a block is no failure."


class StorageQuery(Struct, frozen=True, array_like=True):
    """How many of these leading keys does storage have?"""

    id: MoveId
    keys: tuple[BlockKey, ...]
    seconds_max: float = 0.0
    tokens: bytes = b""
    "Where storage wants them, as in BlockMove."


class StorageAnswer(Struct, frozen=True, array_like=True):
    id: MoveId
    found: int
    error: str | None = None
