"""Opens a pool by its layout or announcement, wherever its memory is: for processes that copy blocks and do not compute."""

from __future__ import annotations

from baton.kvpool.base import Pool
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PoolReady


def create_pool(layout: KVLayout, blocks: int, incarnation: PoolIncarnation | None = None) -> Pool:
    """Create a pool, on this process's GPU if the layout has its format."""
    if layout.format != "token-major":
        return KVPool.create(layout, blocks, incarnation=incarnation)
    from baton.kvpool.device_pool import DevicePool

    return DevicePool.create(layout, blocks, incarnation=incarnation)


def attach_pool(fd: int, announced: PoolReady, *, read_only: bool = False) -> Pool:
    """Attach to a pool. It owns `fd` when this returns; if this raises, the caller still does, and closes it."""
    if announced.memory is None:
        return KVPool.attach(fd, announced, read_only=read_only)
    from baton.kvpool.device_pool import DevicePool

    return DevicePool.attach(fd, announced, read_only=read_only)
