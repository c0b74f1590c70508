"""The engine's hold on the KV pool: a descriptor, announced by the pool's creator and sent to every attacher.

    creator --PoolReady + descriptor--> ENGINE --PoolReady + the same descriptor--> attacher
                                               <--PoolAttached(incarnation)--------

A restarted attacher gets the same pool. A pool whose creator is the messenger outlives it: the engine still has the descriptor,
and sends it to the next messenger and to every worker. A pool whose creator is the worker ends with it: the engine closes it,
asks attachers to unmap it (DetachPool), and waits for their confirmation before another worker creates another.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from typing import NamedTuple

from baton.config import EngineConfig
from baton.core.startup import PROCESS_OF, StartupPlan
from baton.errors import PeerError
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import DetachPool, HostPoolReady, PoolReady
from baton.runtime.processes.child import Child
from baton.runtime.processes.child_set import ChildSet
from baton.runtime.wire.descriptors import send_descriptor

DETACH_SECONDS = 10.0
"""Seconds after which an attacher that has not unmapped a pool is killed: its memory is needed."""


class HeldPool(NamedTuple):
    """A pool that the engine holds by its descriptor."""

    ready: PoolReady | HostPoolReady
    fd: int


Holder = tuple[str, int]
"""Key: a child and its rank."""


class PoolRegistry:
    """Registry of the KV pools, one per rank, for the same ranks of other children: creator and attachers have equally many."""

    def __init__(self, plan: StartupPlan, children: ChildSet[EngineConfig]) -> None:
        self._plan = plan
        self._children = children
        self._creator = PROCESS_OF[plan.creator]
        self._pools: dict[int, HeldPool] = {}
        "Pools of the device, by rank."
        self._sent: dict[Holder, PoolIncarnation] = {}
        "Children that were sent a pool, and have not confirmed that it is unmapped."
        self._attached: dict[Holder, PoolIncarnation] = {}
        "Children that have confirmed a pool."
        self._changed = asyncio.Event()
        self._hosts: dict[int, HeldPool] = {}
        "Memory of the host tier by rank."

    @property
    def pool(self) -> PoolReady | None:
        """The pool of rank 0."""
        held = self._pools.get(0)
        return held.ready if held is not None and isinstance(held.ready, PoolReady) else None

    def attached(self, name: str) -> bool:
        """Whether that child has mapped the present pools. Before, no move may name a block of them."""
        return bool(self._pools) and all(self._is_attached((name, rank)) for rank in self._pools)

    def _is_attached(self, holder: Holder) -> bool:
        held = self._pools.get(holder[1])
        return held is not None and self._attached.get(holder) == held.ready.incarnation

    def on_announced(self, child: Child, ready: PoolReady, fd: int) -> None:
        if child.name != self._creator:
            os.close(fd)
            raise PeerError(f"the {child.name} has announced a KV pool, which is the {self._creator}'s to make")
        _close(self._pools, child.rank)
        self._pools[child.rank] = HeldPool(ready, fd)
        for process in self._plan.processes:
            attacher = self._children.get(process)
            if attacher is not None and attacher.name != child.name:
                self._send_pool(attacher.ranks[child.rank])

    def hold_host_pool(self, child: Child, ready: HostPoolReady, fd: int) -> None:
        """Keep the memory of the host tier: it outlives the cache service that created it."""
        _close(self._hosts, child.rank)
        self._hosts[child.rank] = HeldPool(ready, fd)

    def send_pools(self, child: Child) -> None:
        """Send the pools to a child, as its first message."""
        for rank in child.ranks:
            host = self._hosts.get(rank.rank)
            if child.name == "cache" and host is not None and rank.descriptors is not None:
                send_descriptor(rank.descriptors, host.ready, host.fd)
            self._send_pool(rank)

    def _send_pool(self, rank: Child) -> None:
        """Send the rank its device pool, if there is one."""
        held = self._pools.get(rank.rank)
        if held is not None and rank.descriptors is not None:
            self._sent[rank.name, rank.rank] = held.ready.incarnation
            send_descriptor(rank.descriptors, held.ready, held.fd)

    def on_attached(self, child: Child, incarnation: PoolIncarnation) -> None:
        holder = child.name, child.rank
        self._attached[holder] = incarnation
        if not self._is_attached(holder):  # the order to unmap overtook the pool itself
            child.control.send(DetachPool(incarnation))

    def on_detached(self, child: Child, incarnation: PoolIncarnation) -> None:
        for known in (self._sent, self._attached):
            if known.get((child.name, child.rank)) == incarnation:
                del known[child.name, child.rank]
        self._changed.set()

    def on_lost(self, child: Child) -> None:
        for rank in child.ranks:
            self._sent.pop((child.name, rank.rank), None)
            self._attached.pop((child.name, rank.rank), None)
        self._changed.set()

    async def release(self, lost: str) -> None:
        """Let every process unmap the pools that this child created. Call before another child of that name is started."""
        if not self._pools or lost != self._creator:
            return
        released = [held.ready.incarnation for held in self._pools.values()]
        self.close()
        for child, incarnation in self._holders(released):
            child.control.send(DetachPool(incarnation))
        try:
            async with asyncio.timeout(DETACH_SECONDS):
                while self._holders(released):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            for child, _ in self._holders(released):
                child.kill()

    def _holders(self, released: Collection[PoolIncarnation]) -> list[tuple[Child, PoolIncarnation]]:
        found = ((self._children.get(name), rank, handed) for (name, rank), handed in self._sent.items())
        return [(child.ranks[rank], handed) for child, rank, handed in found if child is not None and handed in released]

    def close_all(self) -> None:
        self.close()
        for rank in list(self._hosts):
            _close(self._hosts, rank)

    def close(self) -> None:
        for rank in list(self._pools):
            _close(self._pools, rank)


def _close(pools: dict[int, HeldPool], rank: int) -> None:
    if (held := pools.pop(rank, None)) is not None:
        os.close(held.fd)
