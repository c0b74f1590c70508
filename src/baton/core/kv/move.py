"""Storage queries and block moves in progress, their waiters, and counters. tiers.py owns the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from baton.config import TierConfig
from baton.core.kv.circuit import Permit
from baton.core.kv.token_links import ChainLink, TokenChain
from baton.protocol.ids import BlockId, BlockKey, Generation, HostBlockId, Instant, MoveId, PoolIncarnation, StepNo
from baton.protocol.moves import BlockMove, MoveKind

PUT_PATIENCE: Final = 10.0
"""Factor by which a put may take longer than a fetch."""


class Pending:
    """A query or move that the cache service has not answered yet. The object owns its waiters: they are listed in `waiters`
    and nowhere else, until it ends or the waiter gives up."""

    __slots__ = ("id", "keys", "permit", "waiters")

    def __init__(self, number: MoveId, keys: Sequence[BlockKey]) -> None:
        self.id = number
        self.keys = tuple(keys)
        self.permit: Permit | None = None
        "Permit of a storage call, open at its circuit until storage answers or is late, whichever is first."
        self.waiters: dict[MoveWaiter, None] = {}
        "Waiters in the order of their arrival."

    def take_waiters(self) -> list[MoveWaiter]:
        """End the waiting: remove and return all waiters."""
        waiters, self.waiters = list(self.waiters), {}
        for waiter in waiters:
            waiter.pending = None
        return waiters


class MoveWaiter:
    """A sequence that waits for one query or move at a time."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: Pending | None = None

    def wait_for(self, pending: Pending) -> None:
        self.pending = pending
        pending.waiters[self] = None

    def leave(self) -> None:
        """Stop waiting. The query or move continues."""
        if self.pending is not None:
            del self.pending.waiters[self]
            self.pending = None


class Question(Pending):
    """A query to storage: how many of these keys it has."""

    __slots__ = ("asked_at", "run")

    def __init__(self, number: MoveId, keys: Sequence[BlockKey], run: TokenChain, asked_at: Instant) -> None:
        super().__init__(number, keys)
        self.run = run
        "Token ids of the keys, if storage wants them."
        self.asked_at = asked_at


class Move(Pending):
    """A move in progress, or kept back by its fence."""

    __slots__ = ("device", "fault", "fence", "generations", "host", "kind", "links", "on_to_storage", "peer", "void", "whole")

    def __init__(self, number: MoveId, kind: MoveKind, keys: Sequence[BlockKey], host: list[HostBlockId]) -> None:
        super().__init__(number, keys)
        self.kind = kind
        self.host = host
        self.device: list[BlockId] = []
        self.generations: list[Generation] = []
        "Store only: generations of the device blocks when the move began."
        self.on_to_storage: list[bool] = []
        "Store only: places of the blocks that are put after their arrival."
        self.links: Sequence[ChainLink | None] = ()
        "Store and fetch, if storage wants token ids: one link per key."
        self.fence: StepNo | None = None
        "Load and pull: the last plan that may write to the targets."
        self.peer: Peer | None = None
        "Pull only: the source."
        self.void = False
        "Whether the content is not used on arrival: the device pool was replaced, or the host tier was cleared."
        self.fault = ""
        "Reason why not all blocks arrived, as text for the log; set after the end."
        self.whole = 0
        "Number of leading blocks that arrived; set after the end."

    @property
    def by_key(self) -> bool:
        """Whether the move reads or writes storage."""
        return self.kind in ("put", "fetch")


class Peer(NamedTuple):
    """Blocks of another instance."""

    address: str
    "Addresses of the messengers that serve the blocks, a line for each rank."
    pool: PoolIncarnation
    blocks: tuple[BlockId, ...]


NO_PEER = Peer("", PoolIncarnation(0), ())


def message_of(move: Move, pool: PoolIncarnation, config: TierConfig, tokens: bytes) -> BlockMove:
    """The message for the cache service. `pool`: the device's."""
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
    """Maximum of seconds that the service may take. No request waits for a put."""
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
        "Number of blocks moved."
        self.lost_stores = 0
        "Copies of blocks that were reassigned before the copy was complete."
        self.skipped_stores = 0
        self.skipped_puts = 0
        "Blocks not copied: the service or storage was behind, or all of the host tier in use."
        self.put_failures = 0
        self.voided_loads = 0
        "Loads and pulls into a pool that was replaced before they ended."
