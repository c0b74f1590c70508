"""The paged KV pool in the memory of an NVIDIA GPU: the same blocks as in shared memory (pool.py), no header before them.

Made by exactly one process, which exports it once; others open the 64 bytes of its handle, which come with PoolReady, over the
engine's own sockets. The descriptor that every such message carries leads to an empty file here.
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
        self, layout: KVLayout, blocks: int, address: int, incarnation: PoolIncarnation, device: int, *, opened: bool = False
    ) -> None:
        self.layout = layout
        self.blocks = blocks
        self.address = address
        "On the device. 0: closed."
        self.incarnation = incarnation
        self.device = device
        self.fd = os.memfd_create("baton-kv-gpu", os.MFD_CLOEXEC)
        self._opened = opened
        self._exported: DeviceMemory | None = None

    @classmethod
    def create(cls, layout: KVLayout, blocks: int, device: int = 0) -> DevicePool:
        if blocks < 1:
            raise InvalidConfig(f"a KV pool needs at least one block, not {blocks}")
        cuda_driver.use_device(device)
        size = blocks * layout.block_bytes
        try:
            address = cuda_driver.allocate(size)
        except DeviceError as error:
            free, _ = cuda_driver.memory_info()
            raise InvalidConfig(
                f"a KV pool of {size / GIB:.2f} GiB does not fit into the {free / GIB:.2f} GiB that are free on the GPU: give "
                f"it fewer blocks ({error})"
            ) from error
        return cls(layout, blocks, address, PoolIncarnation(secrets.randbits(63)), device)

    @classmethod
    def attach(cls, announced: PoolReady) -> DevicePool:
        """The pool of another process."""
        memory = announced.memory
        if memory is None or len(memory.handle) != cuda_driver.HANDLE_BYTES:
            raise ProtocolError("the announcement of a KV pool on a GPU has no handle")
        layout = KVLayout.decode(memory.layout)
        if layout.fingerprint() != announced.fingerprint:
            raise ProtocolError(f"the KV pool has another layout than was announced: {layout}")
        cuda_driver.use_device(memory.device)
        address = cuda_driver.open_exported(memory.handle)
        pool = cls(layout, announced.blocks, address, announced.incarnation, memory.device, opened=True)
        pool._exported = memory  # what was opened cannot be exported again; its own handle is as good for the next one
        return pool

    @property
    def nbytes(self) -> int:
        return self.blocks * self.layout.block_bytes

    def announcement(self) -> PoolReady:
        if self._exported is None:
            cuda_driver.use_device(self.device)
            self._exported = DeviceMemory(cuda_driver.export(self.address), self.layout.encode(), self.device)
        return PoolReady(self.layout.fingerprint(), self.incarnation, self.blocks, self._exported)

    def reading_descriptor(self) -> int:
        return os.dup(self.fd)

    def close(self) -> None:
        """Give the memory back. Tensors made of the pool must be gone."""
        if not self.address:
            return
        cuda_driver.use_device(self.device)
        (cuda_driver.close_exported if self._opened else cuda_driver.free)(self.address)
        self.address = 0
        os.close(self.fd)

    def __repr__(self) -> str:
        state = f"{self.nbytes / 2**20:.1f} MiB" if self.address else "closed"
        return f"<DevicePool {self.blocks} blocks of {self.layout.block_size} tokens, {state}>"
