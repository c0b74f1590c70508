"""A pool by its layout or announcement, wherever its memory is: for processes that copy blocks and do not compute."""

from __future__ import annotations

from baton.kvpool.base import Pool
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool
from baton.protocol.pool import PoolReady


def create_pool(layout: KVLayout, blocks: int) -> Pool:
    """On this process's GPU, if that is whose format the layout has."""
    if layout.format != "token-major":
        return KVPool.create(layout, blocks)
    from baton.kvpool.device_pool import DevicePool

    return DevicePool.create(layout, blocks)


def attach_pool(fd: int, announced: PoolReady, *, read_only: bool = False) -> Pool:
    """`fd` is the pool's when this returns; where it raises, it is still the caller's, who closes it."""
    if announced.memory is None:
        return KVPool.attach(fd, announced, read_only=read_only)
    from baton.kvpool.device_pool import DevicePool

    return DevicePool.attach(fd, announced, read_only=read_only)
