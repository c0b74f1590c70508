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

from baton.config import EngineConfig
from baton.core.startup import PROCESS_OF, StartupPlan
from baton.errors import PeerError
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import DetachPool, HostPoolReady, PoolReady
from baton.runtime.processes.child import Child
from baton.runtime.processes.child_set import ChildSet
from baton.runtime.wire.descriptors import send_descriptor

DETACH_SECONDS = 10.0
"""An attacher that has not unmapped a pool after this time is killed: its memory is needed."""


class PoolRegistry:
    def __init__(self, plan: StartupPlan, children: ChildSet[EngineConfig]) -> None:
        self._plan = plan
        self._children = children
        self._creator = PROCESS_OF[plan.creator]
        self._pool: PoolReady | None = None
        self._fd = -1
        self._handed: dict[str, PoolIncarnation] = {}
        "Children that were sent a pool, and have not confirmed that it is unmapped."
        self._attached: dict[str, PoolIncarnation] = {}
        "Children that have confirmed a pool."
        self._changed = asyncio.Event()
        self._host: HostPoolReady | None = None
        self._host_fd = -1

    @property
    def pool(self) -> PoolReady | None:
        return self._pool

    def attached(self, name: str) -> bool:
        """Has that child mapped the present pool? Before, no move may name a block of it."""
        return self._pool is not None and self._attached.get(name) == self._pool.incarnation

    def on_announced(self, child: Child, ready: PoolReady, fd: int) -> None:
        if child.name != self._creator:
            os.close(fd)
            raise PeerError(f"the {child.name} has announced a KV pool, which is the {self._creator}'s to make")
        self.close()
        self._pool, self._fd = ready, fd
        for process in self._plan.processes:
            attacher = self._children.get(process)
            if attacher is not None and attacher is not child:
                self.hand_to(attacher)

    def keep_host(self, ready: HostPoolReady, fd: int) -> None:
        """Keep the memory of the host tier: it outlives the cache service that created it."""
        self._close_host()
        self._host, self._host_fd = ready, fd

    def hand_to(self, child: Child) -> None:
        """Send the pools to a child, as its first message."""
        if child.name == "cache" and self._host is not None and child.descriptors is not None:
            send_descriptor(child.descriptors, self._host, self._host_fd)
        if self._pool is not None and child.descriptors is not None:
            self._handed[child.name] = self._pool.incarnation
            send_descriptor(child.descriptors, self._pool, self._fd)

    def on_attached(self, child: Child, incarnation: PoolIncarnation) -> None:
        self._attached[child.name] = incarnation
        if not self.attached(child.name):  # the order to unmap it overtook the pool itself
            child.control.send(DetachPool(incarnation))

    def on_detached(self, child: Child, incarnation: PoolIncarnation) -> None:
        for known in (self._handed, self._attached):
            if known.get(child.name) == incarnation:
                del known[child.name]
        self._changed.set()

    def on_lost(self, child: Child) -> None:
        self._handed.pop(child.name, None)
        self._attached.pop(child.name, None)
        self._changed.set()

    async def release(self, lost: str) -> None:
        """Call before another child of that name is started: every process unmaps the pool that it created."""
        if self._pool is None or lost != self._creator:
            return
        incarnation = self._pool.incarnation
        self.close()
        for child in self._holders(incarnation):
            child.control.send(DetachPool(incarnation))
        try:
            async with asyncio.timeout(DETACH_SECONDS):
                while self._holders(incarnation):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            for child in self._holders(incarnation):
                child.process.kill()

    def _holders(self, incarnation: PoolIncarnation) -> list[Child]:
        children = [self._children.get(name) for name, handed in self._handed.items() if handed == incarnation]
        return [child for child in children if child is not None]

    def close_all(self) -> None:
        self.close()
        self._close_host()

    def _close_host(self) -> None:
        if self._host_fd >= 0:
            os.close(self._host_fd)
        self._host, self._host_fd = None, -1

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._pool, self._fd = None, -1
