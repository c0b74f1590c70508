"""How one instance reads the KV pool of another: what every way of doing it has in common.

    decode's cache service                                        prefill's cache service
    messenger.py ---- open(address, pool) ----> transport <---- serve(pool): from now on it may be read
                 ---- read(runs) ------------->     |
                 <--- so many blocks are whole      '....... bytes: of one machine without asking anybody there

Whoever needs bytes reads them. No block ids of the reader travel, nobody writes into a stranger's memory, and a peer that
stands still can only be slow. The rules:

1. `open` verifies that it is the pool that was asked for (incarnation) and that its blocks look like ours (fingerprint).
2. When `read` comes back, nothing of it writes to the target any more, however it ended. Where that cannot be known `read` does
   not come back: the engine kills a service that hangs, and the blocks stay held until it is dead.
3. That the *content* stayed as it was meanwhile is not the transport's to say: the peer's word on its lease is (core/handoff/).
4. What does not work is PeerUnreadable. It costs computing, never a request.

shared_memory.py is the one for instances of one machine, tcp.py the one between machines. An instance may be read in several
ways: its address is then a list, the best one first, with blanks between them. For hardware that reads memory of another
machine by itself two more fit in here:

    Mooncake Transfer Engine   serve registers the pool's memory and tells address and key of it through the segment; open is
                               openSegment and one question for incarnation and layout; read is one batch of READ requests, a
                               request a run, whose status is asked until each is completed or failed
    NIXL                       serve is register_memory, and the agent's metadata is told to who connects; open is
                               add_remote_agent; read is initialize_xfer("READ") with one descriptor a run, and check_xfer_state

Both write to our pool by hardware: `attach` is where they register it, `detach` where they let go. Neither takes a transfer
back, so their `read` waits for its end beyond the deadline, as rule 2 says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from baton.kvcache.storage.backend import Deadline
from baton.kvpool.base import Pool
from baton.kvpool.copies import CopySpan
from baton.protocol.ids import PoolIncarnation


def runs_of(sources: Sequence[int], targets: Sequence[int], blocks_max: int) -> Iterator[CopySpan]:
    """In this order, each as long as it may be: a leading part of them is a leading part of the blocks."""
    begin = 0
    for place in range(1, len(sources) + 1):
        length = place - begin
        if (
            place == len(sources)
            or length == blocks_max
            or sources[place] != sources[begin] + length
            or targets[place] != targets[begin] + length
        ):
            yield CopySpan(sources[begin], targets[begin], length)
            begin = place


class Read(NamedTuple):
    blocks: int
    "So many leading ones are whole now."
    seconds: float
    "What it took, without waiting for a turn."


class PeerPool(Protocol):
    """Another instance's pool, opened."""

    @property
    def scheme(self) -> str:
        """Of the transport that reads it."""
        ...

    @property
    def blocks(self) -> int: ...

    @property
    def fingerprint(self) -> bytes:
        """Of the layout of its blocks."""
        ...

    async def read(self, runs: Sequence[CopySpan], into: Pool, deadline: Deadline, may_go_on: Callable[[], bool]) -> Read:
        """`may_go_on` is asked before anything is written, once a piece."""
        ...

    def close(self) -> None:
        """Reads that are under way may still end; none begins."""
        ...


class Transport(Protocol):
    """Everything is called on the loop, and nothing of it waits but `open` and `read`."""

    @property
    def address(self) -> str:
        """Where others find what we serve: `scheme:...`. Empty: we only read."""
        ...

    @property
    def readers(self) -> Counter[str]:
        """How often others were let in to read (opened), lost their place to another (evicted), or failed."""
        ...

    def attach(self, pool: Pool) -> None:
        """It is ours: `read` writes to it, and others may read it from now on."""
        ...

    def detach(self) -> None:
        """`may_go_on` says no by now. When this returns no `read` writes to it any more, and no other may read it."""
        ...

    async def open(self, address: str, pool: PoolIncarnation, fingerprint: bytes, on_lost: Callable[[], None]) -> PeerPool:
        """PeerUnreadable: it cannot be. The caller has the deadline. `on_lost` is called once, when the peer is gone or lets
        nobody read that pool any more, unless the pool was closed before."""
        ...

    def close(self) -> None: ...
