"""A copy of blocks that is under way, and what is counted of copies. The books are in tiers.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.core.kv.circuit import Attempt
from baton.protocol.ids import BlockId, BlockKey, Generation, HostBlockId, MoveId, PoolIncarnation, StepNo
from baton.protocol.moves import MoveKind


class Move:
    """A move that is under way, or kept back by its fence."""

    __slots__ = (
        "attempt",
        "device",
        "fence",
        "generations",
        "host",
        "id",
        "keys",
        "kind",
        "on_to_storage",
        "peer",
        "void",
        "whole",
    )

    def __init__(self, number: MoveId, kind: MoveKind, keys: Sequence[BlockKey], host: list[HostBlockId]) -> None:
        self.id = number
        self.kind = kind
        self.keys = tuple(keys)
        self.host = host
        self.device: list[BlockId] = []
        self.generations: list[Generation] = []
        "Of the device blocks of a store, as they were."
        self.on_to_storage: list[bool] = []
        "Of a store: which blocks are put when they have arrived."
        self.fence: StepNo | None = None
        "Of a load or pull: the last plan that may write to its targets."
        self.attempt: Attempt | None = None
        "Of a put or fetch: what the circuit of storage calls it."
        self.peer: Peer | None = None
        "Of a pull: from where."
        self.void = False
        "The device pool is another one by now."
        self.whole = 0
        "When it is over: how many leading blocks arrived."


class Peer(NamedTuple):
    """Blocks of another instance."""

    address: str
    "Of the messenger that lets them be read."
    pool: PoolIncarnation
    blocks: tuple[BlockId, ...]


class TierStats:
    __slots__ = (
        "fetched",
        "loaded",
        "lost_stores",
        "pulled",
        "put",
        "put_failures",
        "skipped_puts",
        "skipped_stores",
        "stored",
        "voided_loads",
    )

    def __init__(self) -> None:
        self.stored = self.loaded = self.put = self.fetched = self.pulled = 0
        "Blocks."
        self.lost_stores = 0
        "Copies of blocks that were handed on before the copy was whole."
        self.skipped_stores = 0
        self.skipped_puts = 0
        "Not copied: the service or storage was behind, or all of the host tier in use."
        self.put_failures = 0
        self.voided_loads = 0
        "Loads and pulls into a pool that was another one when they ended."
