"""The paged KV pool in the memory of an NVIDIA GPU: the same blocks as in shared memory (pool.py), without a header.

One process creates it. Its descriptor is passed on as a memfd's is, and keeps the memory alive: the engine holds one, so the
pool outlives its creator. Incarnation and layout come with PoolReady, because the memory has no place for them.
"""

from __future__ import annotations

import os
import secrets

from baton.errors import DeviceError, InvalidConfig, ProtocolError
from baton.kvpool import cuda_driver
from baton.kvpool.layout import KVLayout
from baton.kvpool.memory import GIB
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import DeviceMemory, PoolReady


class DevicePool:
    def __init__(
        self, layout: KVLayout, blocks: int, fd: int, incarnation: PoolIncarnation, device: int, *, read_only: bool = False
    ) -> None:
        """Map the memory behind `fd`, which the pool owns from now on; if this raises it is still the caller's."""
        self.layout = layout
        self.blocks = blocks
        self.incarnation = incarnation
        self.device = device
        "Number of the GPU as this process sees it."
        self.gpu = cuda_driver.uuid_of(device)
        self._mapped_bytes = rounded_bytes(self.nbytes, device)
        handle = cuda_driver.import_memory(fd)
        try:
            self.address = cuda_driver.map_memory(handle, self._mapped_bytes, device, read_only=read_only)
            "Address of the pool on the device. 0: closed."
        finally:
            cuda_driver.release_memory(handle)  # the mapping and the descriptor keep the memory
        self.fd = fd

    @classmethod
    def create(cls, layout: KVLayout, blocks: int, device: int = 0, incarnation: PoolIncarnation | None = None) -> DevicePool:
        if blocks < 1:
            raise InvalidConfig(f"a KV pool needs at least one block, not {blocks}")
        cuda_driver.use_device(device)
        fd = _new_memory(blocks * layout.block_bytes, device)
        try:
            incarnation = PoolIncarnation(secrets.randbits(63)) if incarnation is None else incarnation
            return cls(layout, blocks, fd, incarnation, device)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, announced: PoolReady, *, read_only: bool = False) -> DevicePool:
        """Attach to the pool behind `fd`, and own it. `read_only`: another instance's pool."""
        memory = announced.memory
        if memory is None:
            raise ProtocolError("the announcement of a KV pool on a GPU does not say on which")
        layout = KVLayout.decode(memory.layout)
        if layout.fingerprint() != announced.fingerprint:
            raise ProtocolError(f"the KV pool has another layout than was announced: {layout}")
        device = cuda_driver.device_with(memory.gpu)
        if device is None:
            raise DeviceError(f"the KV pool is on the GPU {memory.gpu}, which this process does not use")
        cuda_driver.use_device(device)
        return cls(layout, announced.blocks, fd, announced.incarnation, device, read_only=read_only)

    @property
    def nbytes(self) -> int:
        return self.blocks * self.layout.block_bytes

    def announcement(self) -> PoolReady:
        memory = DeviceMemory(self.layout.encode(), self.gpu)
        return PoolReady(self.layout.fingerprint(), self.incarnation, self.blocks, memory)

    def reading_descriptor(self) -> int:
        """A descriptor for a reader. The driver has no read-only ones: a reader maps the memory read-only (`attach`)."""
        return os.dup(self.fd)

    def close(self) -> None:
        """Unmap the pool and close the descriptor. Tensors over the pool must be gone."""
        if not self.address:
            return
        cuda_driver.use_device(self.device)
        cuda_driver.unmap_memory(self.address, self._mapped_bytes)
        self.address = 0
        os.close(self.fd)

    def __repr__(self) -> str:
        state = f"{self.nbytes / 2**20:.1f} MiB" if self.address else "closed"
        return f"<DevicePool {self.blocks} blocks of {self.layout.block_size} tokens, {state}>"


def rounded_bytes(nbytes: int, device: int) -> int:
    """Size that the driver allocates for this many bytes."""
    unit = cuda_driver.granularity(device)
    return -(-nbytes // unit) * unit


def _new_memory(nbytes: int, device: int) -> int:
    """Allocate memory and return its descriptor."""
    try:
        handle = cuda_driver.create_memory(rounded_bytes(nbytes, device), device)
    except DeviceError as error:
        free, _ = cuda_driver.memory_info()
        if nbytes <= free:
            raise
        raise InvalidConfig(
            f"a KV pool of {nbytes / GIB:.2f} GiB does not fit into the {free / GIB:.2f} GiB that are free on the GPU: give "
            f"it fewer blocks ({error})"
        ) from error
    try:
        return cuda_driver.export_memory(handle)
    finally:
        cuda_driver.release_memory(handle)
