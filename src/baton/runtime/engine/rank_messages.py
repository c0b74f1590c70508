"""Messages to each rank of a child: its part of a move, and the memory that the ranks of a worker share.

The other way, messages of the ranks are combined in core/rank_messages.py.
"""

from __future__ import annotations

import os

from msgspec.structs import replace

from baton.protocol.control import CollectiveShared
from baton.protocol.ids import WorkerEpoch
from baton.protocol.moves import BlockMove
from baton.protocol.pool import of_rank
from baton.runtime.processes.child import Child
from baton.runtime.processes.children import nameless_file
from baton.runtime.wire.descriptors import send_descriptor


def for_rank(message: BlockMove, rank: int, ranks: int) -> BlockMove:
    """A move of the core for one rank's service: pools and addresses are those of its rank."""
    peers = message.peer.split("\n") if message.peer else []
    # Routers refuse instances with other numbers of ranks (core/cluster/fit.py): such an address leads nowhere.
    peer = peers[rank] if len(peers) == ranks else ""
    other = of_rank(message.peer_pool, rank) if message.peer_pool else message.peer_pool
    return replace(message, pool=of_rank(message.pool, rank), peer=peer, peer_pool=other)


def share_collective(worker: Child) -> None:
    """Send all ranks of a new set one empty memory file."""
    fd = nameless_file(b"", "baton-collective")
    try:
        for rank in worker.ranks:
            if rank.descriptors is not None:
                send_descriptor(rank.descriptors, CollectiveShared(WorkerEpoch(worker.life), len(worker.ranks)), fd)
    finally:
        os.close(fd)
