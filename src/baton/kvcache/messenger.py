"""The messenger: copies blocks from the KV pools of other instances into ours (`pull`), and lets others read ours.

    submit(move) .. open the peer's pool, if it is not open (peers.py) .. read (transport.py) .. report(result)

Pulls run beside each other and beside copies of the tiers (transfer.py): a peer that does not answer delays no other pull.
Every failure is in the result: no request fails because of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from baton.config import WireConfig
from baton.errors import DeviceError, PeerUnreadable
from baton.kvcache.peers import Peers
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.transport import PeerPool, Read, Transport, runs_of
from baton.kvpool.base import Pool
from baton.protocol.moves import BlockMove, MoveResult
from baton.repeats import Repeats, printable

logger = logging.getLogger("baton.cache")

COPIED: Final = "copied"
DETACHED: Final = "detached"
RUN_BYTES: Final = 16 << 20
"""Maximum of bytes copied between two checks of the deadline: some milliseconds."""


class Messenger:
    """The messenger, on one loop. `transports`: by scheme, the best first; the messenger closes them."""

    def __init__(
        self, transports: Mapping[str, Transport], report: Callable[[MoveResult], None], wire: WireConfig | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._transports = transports
        self._report = report
        self._device: Pool | None = None
        self._fingerprint = b""
        self._peers = Peers(transports, wire)
        self._under_way: dict[asyncio.Task[None], None] = {}
        self.pulls = Pulls()

    @property
    def address(self) -> str:
        """Addresses at which others read our pool."""
        return " ".join(transport.address for transport in self._transports.values() if transport.address)

    def readers(self) -> dict[str, int]:
        """Number of others' connections that read our pool, by transport and outcome."""
        return {
            f"{scheme}/{event}": count
            for scheme, transport in self._transports.items()
            for event, count in transport.readers.items()
        }

    def attach(self, pool: Pool) -> None:
        self._device, self._fingerprint = pool, pool.layout.fingerprint()
        for transport in self._transports.values():
            transport.attach(pool)

    def detach(self) -> None:
        """Detach the pool. When this returns no copy to it is in progress, and no peer may begin to read it."""
        self._device = None
        for transport in self._transports.values():
            transport.detach()

    def submit(self, move: BlockMove) -> asyncio.Task[None]:
        task = asyncio.create_task(self._pull(move, Deadline.after(move.seconds_max)))
        self._under_way[task] = None
        task.add_done_callback(lambda task: self._under_way.pop(task, None))
        return task

    def close(self) -> None:
        """Cancel the pulls in progress, without results."""
        for task in self._under_way:
            task.cancel()
        self._device = None
        for transport in self._transports.values():
            transport.close()
        self._peers.close_all()

    async def _pull(self, move: BlockMove, deadline: Deadline) -> None:
        """Copy the blocks of a move from the pool of its peer, and report how many arrived. Raises nothing for a failed
        peer."""
        read, error, outcome, transport, nbytes = Read(0, 0.0), None, COPIED, "none", 0
        try:
            device = self._attached(move)
            peer = await self._peers.opened((move.peer, move.peer_pool), self._fingerprint, deadline)
            transport = peer.scheme
            _verify(move, peer, self._attached(move))
            runs = list(runs_of(move.peer_blocks, move.device, max(1, RUN_BYTES // device.layout.block_bytes)))
            read = await peer.read(runs, device, deadline, lambda: self._device is device)
            nbytes = read.blocks * device.layout.block_bytes
            if read.blocks < len(move.device):
                late = self._device is device
                error, outcome = ("it took too long", "late") if late else ("the pool was detached", DETACHED)
        except PeerUnreadable as failed:
            error, outcome = str(failed), failed.outcome
            transport = failed.transport if transport == "none" else transport
        except DeviceError as failed:
            error, outcome = str(failed), "device"
        self.pulls.ended(transport, outcome, nbytes, read.seconds)
        if error is not None:
            self.pulls.log_failure(move.peer, transport, outcome, error, self._loop.time())
        self._report(MoveResult(move.id, read.blocks, read.seconds, error))

    def _attached(self, move: BlockMove) -> Pool:
        if self._device is None or self._device.incarnation != move.pool:
            raise PeerUnreadable("another pool is attached", DETACHED)
        return self._device


def _verify(move: BlockMove, peer: PeerPool, device: Pool) -> None:
    """Verify a peer's block ids, which come from another instance: an invalid one must not become a read of other memory."""
    if peer.fingerprint != device.layout.fingerprint():
        raise PeerUnreadable("the peer's KV pool has another layout")
    if len(move.peer_blocks) != len(move.device):
        raise PeerUnreadable(f"{len(move.peer_blocks)} blocks of the peer are to go into {len(move.device)} of ours")
    for ids, blocks in ((move.peer_blocks, peer.blocks), (move.device, device.blocks)):
        if ids and (min(ids) < 0 or max(ids) >= blocks):
            raise PeerUnreadable(f"there is no such block in a pool of {blocks}")


class Pulls:
    """Counters of one life of the cache service; the engine adds up its lives (runtime/engine/cache_supervisor.py)."""

    def __init__(self) -> None:
        self._repeats = Repeats()
        self.outcomes: Counter[str] = Counter()
        "Number of pulls by transport and outcome, as `tcp/copied`."
        self.nbytes: Counter[str] = Counter()
        self.microseconds: Counter[str] = Counter()
        "Copied bytes (`nbytes`) and the time of the copies, by transport."

    def ended(self, transport: str, outcome: str, nbytes: int, seconds: float) -> None:
        self.outcomes[f"{transport}/{outcome}"] += 1
        if nbytes:
            self.nbytes[transport] += nbytes
            self.microseconds[transport] += round(1e6 * seconds)

    def log_failure(self, peer: str, transport: str, outcome: str, why: str, now: float) -> None:
        """Log once per minute for the same peer and reason."""
        if outcome != DETACHED and (times := self._repeats.due((peer, outcome, why), now)):
            again = f" ({times} times)" if times > 1 else ""
            logger.warning(
                "KV blocks cannot be read from %s over %s: %s: %s%s", printable(peer), transport, outcome, printable(why), again
            )
