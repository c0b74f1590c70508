"""Questions and copies of blocks that are under way, what waits for them, and what is counted. The books are in tiers.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from baton.config import TierConfig
from baton.core.kv.circuit import Permit
from baton.core.kv.token_links import ChainLink, TokenChain
from baton.protocol.ids import BlockId, BlockKey, Generation, HostBlockId, Instant, MoveId, PoolIncarnation, StepNo
from baton.protocol.moves import BlockMove, MoveKind

PUT_PATIENCE: Final = 10.0
"""A put may take so many times longer than a fetch."""


class Pending:
    """A question or move that the cache service has not answered yet. It owns its waiters: what waits for it is in `waiters`
    and nowhere else, and leaves when it ends or when the waiter gives up."""

    __slots__ = ("id", "keys", "permit", "waiters")

    def __init__(self, number: MoveId, keys: Sequence[BlockKey]) -> None:
        self.id = number
        self.keys = tuple(keys)
        self.permit: Permit | None = None
        "To or from storage: open at its circuit until storage answers or is late, whichever is first."
        self.waiters: dict[MoveWaiter, None] = {}
        "In the order in which they came."

    def take_waiters(self) -> list[MoveWaiter]:
        """It has ended: nothing waits for it any more."""
        waiters, self.waiters = list(self.waiters), {}
        for waiter in waiters:
            waiter.pending = None
        return waiters


class MoveWaiter:
    """Waits for one question or move at a time."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: Pending | None = None

    def wait_for(self, pending: Pending) -> None:
        self.pending = pending
        pending.waiters[self] = None

    def leave(self) -> None:
        """It does not wait any longer. What it waited for goes on."""
        if self.pending is not None:
            del self.pending.waiters[self]
            self.pending = None


class Question(Pending):
    """How many of these keys does storage have?"""

    __slots__ = ("asked_at", "run")

    def __init__(self, number: MoveId, keys: Sequence[BlockKey], run: TokenChain, asked_at: Instant) -> None:
        super().__init__(number, keys)
        self.run = run
        "Token ids of the keys, where storage wants those."
        self.asked_at = asked_at


class Move(Pending):
    """A move that is under way, or kept back by its fence."""

    __slots__ = ("device", "fault", "fence", "generations", "host", "kind", "links", "on_to_storage", "peer", "void", "whole")

    def __init__(self, number: MoveId, kind: MoveKind, keys: Sequence[BlockKey], host: list[HostBlockId]) -> None:
        super().__init__(number, keys)
        self.kind = kind
        self.host = host
        self.device: list[BlockId] = []
        self.generations: list[Generation] = []
        "Of the device blocks of a store, as they were."
        self.on_to_storage: list[bool] = []
        "Of a store: which blocks are put when they have arrived."
        self.links: Sequence[ChainLink | None] = ()
        "Of a store or fetch, where storage wants token ids: one for each key."
        self.fence: StepNo | None = None
        "Of a load or pull: the last plan that may write to its targets."
        self.peer: Peer | None = None
        "Of a pull: from where."
        self.void = False
        "What arrives is for nobody: the device pool is another one by now, or the host tier was cleared."
        self.fault = ""
        "When it is over: why not all of it arrived, for people."
        self.whole = 0
        "When it is over: how many leading blocks arrived."

    @property
    def by_key(self) -> bool:
        """From or to storage."""
        return self.kind in ("put", "fetch")


class Peer(NamedTuple):
    """Blocks of another instance."""

    address: str
    "Of the messenger that lets them be read."
    pool: PoolIncarnation
    blocks: tuple[BlockId, ...]


NO_PEER = Peer("", PoolIncarnation(0), ())


def message_of(move: Move, pool: PoolIncarnation, config: TierConfig, tokens: bytes) -> BlockMove:
    """What the service is told. `pool`: the device's."""
    peer = move.peer or NO_PEER
    return BlockMove(
        move.id,
        move.kind,
        tuple(move.host),
        tuple(move.device),
        PoolIncarnation(0) if move.by_key else pool,
        move.keys if move.by_key else (),
        seconds_max(move.kind, config),
        peer.address,
        peer.pool,
        peer.blocks,
        tokens,
    )


def seconds_max(kind: MoveKind, config: TierConfig) -> float:
    """How long the service may take for it. Nothing waits for a put."""
    if kind == "put":
        return PUT_PATIENCE * config.storage_seconds_max
    if kind == "pull":
        return config.pull_seconds_max
    return config.storage_seconds_max if kind == "fetch" else 0.0


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
