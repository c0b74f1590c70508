"""Copies of blocks between pools: device and host (tiers), device and device (hand-off).

in shared memory   one memory copy per block or run
on a GPU           one DMA per block or run, all queued at once on a separate stream; then one wait for all of them

A copy on a GPU needs no event of the worker: the core orders it after the steps before it have ended, and plans a step that
needs the copy after the copy is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from baton.errors import InvariantBroken
from baton.kvpool import cuda_driver
from baton.kvpool.base import Pool
from baton.kvpool.device_pool import DevicePool
from baton.kvpool.pool import KVPool


class CopySpan(NamedTuple):
    """Blocks that are contiguous in both pools, for one copy."""

    source: int
    target: int
    blocks: int


def runs_of(sources: Sequence[int], targets: Sequence[int]) -> list[CopySpan]:
    """Join blocks that are contiguous in both pools, ascending or descending."""
    runs: list[CopySpan] = []
    for source, target in zip(sources, targets, strict=True):
        if runs:
            first, into, count = runs[-1]
            if (source, target) == (first + count, into + count):
                runs[-1] = CopySpan(first, into, count + 1)
                continue
            if (source, target) == (first - 1, into - 1):
                runs[-1] = CopySpan(source, target, count + 1)
                continue
        runs.append(CopySpan(source, target, 1))
    return runs


class TierCopies(Protocol):
    """Copies between one device pool and one host pool. Used by one thread at a time, whichever."""

    def store(self, device: Sequence[int], host: Sequence[int]) -> None: ...

    def load(self, host: Sequence[int], device: Sequence[int]) -> None: ...

    def close(self) -> None: ...


def tier_copies(device: Pool, host: KVPool) -> TierCopies:
    if isinstance(device, DevicePool):
        return _DeviceCopies(device, host)
    assert isinstance(device, KVPool)
    return _MemoryCopies(device, host)


class _MemoryCopies:
    def __init__(self, device: KVPool, host: KVPool) -> None:
        self._device, self._host = device, host

    def store(self, device: Sequence[int], host: Sequence[int]) -> None:
        source, target = self._device.data, self._host.data
        for block, place in zip(device, host, strict=True):
            target[place] = source[block]

    def load(self, host: Sequence[int], device: Sequence[int]) -> None:
        source, target = self._host.data, self._device.data
        for place, block in zip(host, device, strict=True):
            target[block] = source[place]

    def close(self) -> None:
        pass


class _DeviceCopies:
    """Copies between a device pool and a host pool, whose memory is pinned meanwhile: otherwise a copy would pass through a
    buffer of the driver's."""

    def __init__(self, device: DevicePool, host: KVPool) -> None:
        cuda_driver.use_device(device.device)
        self._device, self._bytes = device, device.layout.block_bytes
        self._host = host.data.ctypes.data
        self._stream = cuda_driver.CopyStream()
        cuda_driver.register_host(self._host, host.data.nbytes)

    def store(self, device: Sequence[int], host: Sequence[int]) -> None:
        cuda_driver.use_device(self._device.device)  # the device is bound per thread, and another thread may do the next copy
        size, base = self._bytes, self._device.address
        for block, place, count in runs_of(device, host):
            self._stream.to_host(self._host + place * size, base + block * size, count * size)
        self._stream.wait()

    def load(self, host: Sequence[int], device: Sequence[int]) -> None:
        cuda_driver.use_device(self._device.device)
        size, base = self._bytes, self._device.address
        for place, block, count in runs_of(host, device):
            self._stream.to_device(base + block * size, self._host + place * size, count * size)
        self._stream.wait()

    def close(self) -> None:
        cuda_driver.use_device(self._device.device)  # the closing thread may differ from the copying one
        self._stream.wait()
        cuda_driver.unregister_host(self._host)
        self._stream.close()


def copy_runs(source: Pool, target: Pool, runs: Sequence[CopySpan], may_go_on: Callable[[], bool]) -> int:
    """Copy these runs, and return how many leading blocks are complete. `may_go_on` is asked before every run."""
    if isinstance(source, DevicePool) and isinstance(target, DevicePool):
        return _copy_on_device(source, target, runs, may_go_on)
    if not (isinstance(source, KVPool) and isinstance(target, KVPool)):
        raise InvariantBroken("blocks of a GPU's pool are not those of a pool in shared memory")
    whole, data, into = 0, source.data, target.data
    for run in runs:
        if not may_go_on():
            break
        np.copyto(into[run.target : run.target + run.blocks], data[run.source : run.source + run.blocks])
        whole += run.blocks
    return whole


def _copy_on_device(source: DevicePool, target: DevicePool, runs: Sequence[CopySpan], may_go_on: Callable[[], bool]) -> int:
    cuda_driver.use_device(target.device)
    stream, whole, size = cuda_driver.CopyStream(), 0, source.layout.block_bytes
    try:
        for run in runs:
            if not may_go_on():
                break
            stream.on_device(target.address + run.target * size, source.address + run.source * size, run.blocks * size)
            whole += run.blocks
        stream.wait()
    finally:
        stream.close()
    return whole
