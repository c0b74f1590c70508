"""The interface of all transports, by which one instance reads the KV pool of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from baton.kvcache.storage.backend import Deadline
from baton.kvpool.base import Pool
from baton.kvpool.copies import CopySpan
from baton.protocol.ids import PoolIncarnation


def runs_of(sources: Sequence[int], targets: Sequence[int], blocks_max: int) -> Iterator[CopySpan]:
    """Join contiguous blocks into runs of at most `blocks_max`, in order: leading runs are leading blocks."""
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
    "Number of leading blocks that are complete."
    seconds: float
    "Seconds of the read, without the wait for a turn."


class PeerPool(Protocol):
    """Another instance's open pool."""

    @property
    def scheme(self) -> str:
        """Scheme of its transport."""
        ...

    @property
    def blocks(self) -> int: ...

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the layout of its blocks."""
        ...

    async def read(self, runs: Sequence[CopySpan], into: Pool, deadline: Deadline, may_go_on: Callable[[], bool]) -> Read:
        """Read blocks. `may_go_on` is asked before every write, once per piece."""
        ...

    def close(self) -> None:
        """Close the pool. Running reads may still end; none begins."""
        ...


class Transport(Protocol):
    """A way to other instances' pools. Every method is called on the loop, and only `open` and `read` wait."""

    @property
    def address(self) -> str:
        """Address at which others find our pool: `scheme:...`. Empty: we only read."""
        ...

    @property
    def readers(self) -> Counter[str]:
        """Number of readers that were accepted (opened), replaced by another (evicted), or failed."""
        ...

    def attach(self, pool: Pool) -> None:
        """Attach our pool: `read` writes to it, and others may read it from now on."""
        ...

    def detach(self) -> None:
        """Detach our pool; `may_go_on` already returns False. When this returns no `read` writes to it any more, and no peer
        may read it."""
        ...

    async def open(self, address: str, pool: PoolIncarnation, fingerprint: bytes, on_lost: Callable[[], None]) -> PeerPool:
        """Open a peer's pool. Raises PeerUnreadable. The caller sets the deadline. `on_lost` is called once, when the peer is
        lost or withdraws that pool, unless the pool was closed before."""
        ...

    def close(self) -> None: ...
