"""The paged KV pool: one region of shared memory that any process can attach to, freed with the last process that has it.

    byte 0        4096                                                                       nbytes
    | header      | block 0              | block 1              | ...                        |

layout.py describes a block. The region is anonymous (memfd): no name in any file system, so nothing is left behind however its
processes end. Every process with the file descriptor sees the same bytes. The header has the layout and the incarnation, and an
attacher that expects others is refused. The size is sealed: no process can truncate the region under a reader.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.errors import InvalidConfig, InvariantBroken, ProtocolError
from baton.kvpool.layout import NUMPY_TYPES, KVLayout
from baton.kvpool.memory import GIB, main_memory
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PoolReady

MAGIC = b"batonKV3"
HEADER = struct.Struct("<8s32sQQI")
"""Header: magic, layout fingerprint, blocks, incarnation, length of the layout, which follows as JSON."""
HEADER_BYTES = 4096
"""Bytes of the header: a whole page, so that blocks start at one."""


def pool_bytes(layout: KVLayout, blocks: int) -> int:
    return HEADER_BYTES + blocks * layout.block_bytes


class KVPool:
    """Pool in shared memory, created by exactly one process (`create`), attached by others (`attach`)."""

    def __init__(
        self, layout: KVLayout, blocks: int, fd: int, incarnation: PoolIncarnation, *, read_only: bool = False
    ) -> None:
        self.layout = layout
        self.blocks = blocks
        self.fd = fd
        self.incarnation = incarnation
        "Incarnation of the pool: a restarted worker that finds the same one may use its content."
        access = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
        self._map: mmap.mmap | None = mmap.mmap(fd, pool_bytes(layout, blocks), mmap.MAP_SHARED, access)
        # Arrays hold the mapping, so that closing under a living one is an error and not a crash.
        numbers: NDArray[Any] = np.frombuffer(self._map, NUMPY_TYPES[layout.dtype], offset=HEADER_BYTES)
        heads, dim, size = layout.kv_heads, layout.head_dim, layout.block_size
        self.data = numbers.reshape(blocks, layout.block_numbers)
        "All blocks, [block, everything]: copied by moves."
        if layout.format == "turned":
            self.keys = numbers.reshape(blocks, layout.layers, 2, heads, dim, size)[:, :, 0]
            "Keys, [block, layer, kv_head, head_dim, token]. Only for this format: others are read by their kernels only."
            self.values = numbers.reshape(blocks, layout.layers, 2, heads, size, dim)[:, :, 1]
            "Values, [block, layer, kv_head, token, head_dim]."

    @classmethod
    def create(
        cls, layout: KVLayout, blocks: int, name: str = "baton-kv", incarnation: PoolIncarnation | None = None
    ) -> KVPool:
        """Create a pool, with a random incarnation if none is given. Its memory is reserved now: a pool that does not fit fails
        here and not in the middle of a request."""
        if blocks < 1:
            raise InvalidConfig(f"a KV pool needs at least one block, not {blocks}")
        size = pool_bytes(layout, blocks)
        incarnation = PoolIncarnation(secrets.randbits(63)) if incarnation is None else incarnation
        free = main_memory().free_bytes
        if size > free:  # Linux overcommits: the OOM killer would act later
            raise InvalidConfig(
                f"a KV pool of {size / GIB:.2f} GiB does not fit into {free / GIB:.2f} GiB: give it fewer blocks"
            )
        fd = _anonymous_file(size, name)
        try:
            _write_header(fd, layout, blocks, incarnation)
            return cls(layout, blocks, fd, incarnation)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, announced: PoolReady, *, read_only: bool = False) -> KVPool:
        """Attach to the pool behind `fd`, and own it. Raises ProtocolError unless it is the announced one. `read_only`: another
        instance's pool, so its size must be sealed too: reading a truncated region would kill us."""
        layout, blocks, incarnation = _read_header(fd)
        if layout.fingerprint() != announced.fingerprint:
            raise ProtocolError(f"the KV pool has another layout than was announced: {layout}")
        if (incarnation, blocks) != (announced.incarnation, announced.blocks):
            raise ProtocolError("this is another KV pool than the one that was announced")
        if os.fstat(fd).st_size != pool_bytes(layout, blocks):
            raise ProtocolError(f"the KV pool says {blocks} blocks and has {os.fstat(fd).st_size} bytes")
        if read_only and not _size_is_sealed(fd):
            raise ProtocolError("the size of the KV pool is not sealed")
        return cls(layout, blocks, fd, incarnation, read_only=read_only)

    def reading_descriptor(self) -> int:
        """A second descriptor of the same memory, for a reader, through which no write is possible."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def announcement(self) -> PoolReady:
        return PoolReady(self.layout.fingerprint(), self.incarnation, self.blocks)

    def close(self) -> None:
        """Unmap the pool and close the descriptor. Arrays and tensors over the pool must be gone: their memory would be."""
        if self._map is None:
            return
        for name in ("data", "keys", "values"):
            self.__dict__.pop(name, None)
        try:
            self._map.close()
        except BufferError:
            raise InvariantBroken("a KV pool is closed while an array of it is still in use") from None
        self._map = None
        os.close(self.fd)

    def __repr__(self) -> str:
        state = "closed" if self._map is None else f"{pool_bytes(self.layout, self.blocks) / 2**20:.1f} MiB"
        return f"<KVPool {self.blocks} blocks of {self.layout.block_size} tokens, {state}>"


def _write_header(fd: int, layout: KVLayout, blocks: int, incarnation: PoolIncarnation) -> None:
    words = layout.encode()
    os.pwrite(fd, HEADER.pack(MAGIC, layout.fingerprint(), blocks, incarnation, len(words)) + words, 0)


def _read_header(fd: int) -> tuple[KVLayout, int, PoolIncarnation]:
    header = os.pread(fd, HEADER_BYTES, 0).ljust(HEADER.size, b"\0")
    magic, fingerprint, blocks, incarnation, length = HEADER.unpack_from(header)
    if magic != MAGIC:
        raise ProtocolError("the file descriptor does not lead to a KV pool")
    layout = KVLayout.decode(header[HEADER.size : HEADER.size + length])
    if layout.fingerprint() != fingerprint:
        raise ProtocolError(f"the header of the KV pool is broken: its layout is not {layout}")
    return layout, blocks, PoolIncarnation(incarnation)


def _size_is_sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except (AttributeError, OSError):  # the kernel or the file has no seals
        return False


def _anonymous_file(size: int, name: str) -> int:
    fd = _open_anonymous(name)
    try:
        _reserve(fd, size)
        if hasattr(fcntl, "F_ADD_SEALS"):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        raise InvalidConfig(
            f"a KV pool of {size / GIB:.2f} GiB cannot be reserved ({error.strerror}): give it fewer blocks"
        ) from error
    return fd


def _open_anonymous(name: str) -> int:
    """Create an unnamed file. `name` shows only in a process's list of mappings."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:  # an unlinked file, without memfd
        return os.dup(file.fileno())


def _reserve(fd: int, size: int) -> None:
    os.ftruncate(fd, size)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
