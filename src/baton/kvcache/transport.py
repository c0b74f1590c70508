"""How one instance reads the KV pool of another: the interface of all transports.

    decode's cache service                                        prefill's cache service
    messenger.py ---- open(address, pool) ----> transport <---- serve(pool): from now on it may be read
                 ---- read(runs) ------------->     |
                 <--- number of complete blocks     '....... bytes: on one machine without involving the peer

The instance that needs bytes reads them. No block ids of the reader are sent, no instance writes into another's memory, and a
stalled peer can only be slow. The rules:

1. `open` verifies that it is the requested pool (incarnation) and that its blocks have our layout (fingerprint).
2. When `read` returns, nothing of it writes to the target any more, however it ended. If that cannot be known `read` does
   not return: the engine kills a service that hangs, and the blocks stay held until it is dead.
3. The transport does not guarantee that the *content* stayed unchanged meanwhile: the peer's lease does (core/handoff/).
4. Every failure is PeerUnreadable. It costs computing, never a request.

shared_memory.py connects instances of one machine, tcp.py machines. An instance may be readable in several ways: its address is
then a list, the best one first, separated by blanks. A third transport, for hardware that reads memory of another machine by
itself, fits in here if it promises as much (testing/transport_suite.py checks what can be checked):

    no late write     Bytes of a read that was given up (deadline, `may_go_on`, detach, cancellation) are never written to the
                      pool: its blocks belong to other requests by then. Mooncake's Transfer Engine and NIXL cannot cancel a
                      transfer: both were tried, and wrote all of it after a stopped peer went on, although they had said that
                      it had ended. So their target is memory of the transport's own, registered once and not the pool; a
                      verified copy follows. What a read that was given up has in it is used again only after the library
                      reports its transfer as completed or failed, or never.
    a deadline        `read` returns at its deadline though the peer is stopped: neither library has one.
    no stranger       A peer that has not proved the cluster's secret learns no address or key of registered memory, and reads
                      nothing; no remote side writes. Mooncake lets a stranger read and write, NIXL has no authentication:
                      metadata goes over an authenticated connection (trust/), and the pool is registered read-only.
    verified bytes    Blocks count once a digest of the peer's was compared (digests.py), except within a machine.
    the end           A lost peer raises PeerUnreadable at once, not at the deadline; `on_lost` is called once.

    Mooncake          serve registers the pool's memory; open is openSegment and one query for incarnation and layout; read is
                      one batch of READ requests, one per run, whose status is polled
    NIXL              serve is register_memory; open is add_remote_agent; read is initialize_xfer("READ") with one descriptor
                      per run, and check_xfer_state
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
    "Duration, without the wait for a turn."


class PeerPool(Protocol):
    """Another instance's pool, opened."""

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
        """`may_go_on` is asked before every write, once per piece."""
        ...

    def close(self) -> None:
        """Close the pool. Reads under way may still end; none begins."""
        ...


class Transport(Protocol):
    """Everything is called on the loop, and nothing waits except `open` and `read`."""

    @property
    def address(self) -> str:
        """Where others find our pool: `scheme:...`. Empty: we only read."""
        ...

    @property
    def readers(self) -> Counter[str]:
        """How many readers were accepted (opened), replaced by another (evicted), or failed."""
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
