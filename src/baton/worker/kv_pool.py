"""The paged KV pool: one region of shared memory that any process can attach, and that dies with the last that has it.

    byte 0        4096                                                                       nbytes
    | header      | block 0              | block 1              | ...                        |
    |             /                       \\
                 | layer 0                 | layer 1                 | ...
                 /                          \\
                | keys                       | values                     |
                | [kv_heads][head_dim][size] | [kv_heads][size][head_dim] |

A block holds `size` tokens of every layer and is one run of bytes: to move it to another tier or another instance is one
copy. Keys are turned (head_dim outside, token inside): attention then works out the scores of neighbouring tokens in
the lanes of one vector, in place. Values are not, for the same reason: there the output's dimensions are the lanes.

In bfloat16-pairs they lie in pairs, for processors that multiply tiles (native/csrc/attention_tiles.h). In int8 they lie in
fours, and behind those of a head come the scales of its tokens; its keys are rotated (native/csrc/attention_bytes.h).

The region is anonymous (memfd): no name in any file system, so nothing is left behind however its processes end. Whoever
is given the file descriptor sees the same bytes. The header says what the bytes mean, and an attacher that means
something else is refused. The size is sealed: nobody can cut the region short under a reader.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from baton.errors import InvalidConfig, InvariantBroken, ProtocolError
from baton.models.config import ModelConfig
from baton.worker.memory import main_memory

GIB = 2**30

MAGIC = b"batonKV2"
HEADER = struct.Struct("<8s32sQ16s")
"""Magic, layout fingerprint, blocks, incarnation."""
HEADER_BYTES = 4096
"""A whole page, so that blocks start at one."""

KVDtype = Literal["float32", "float16", "bfloat16", "bfloat16-pairs", "int8"]
NUMPY_TYPES: dict[KVDtype, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # numpy has none: its arrays show the bits
    "bfloat16-pairs": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
}
TURNED = "k(head,dim,token) v(head,token,dim)"
ORDERS: dict[KVDtype, str] = {
    "float32": TURNED,
    "float16": TURNED,
    "bfloat16": TURNED,
    "bfloat16-pairs": "k(head,dim/2,token,2) v(head,token/2,dim,2)",
    "int8": "k(head,rotated dim/4,token,4; scales) v(head,token/4,dim,4; scales)",
}
"""How a block's numbers lie in a layer: native/csrc/attention.h, attention_tiles.h, attention_bytes.h."""
SCALE_BYTES = 4
"""Of the float32 that multiplies a head's numbers of one token, with int8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """What the bytes of a block mean. Two pools with the same fingerprint can exchange blocks."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    "Tokens."
    dtype: KVDtype

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, dtype: KVDtype) -> KVLayout:
        return cls(layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, block_size=block_size, dtype=dtype)

    @property
    def itemsize(self) -> int:
        return NUMPY_TYPES[self.dtype].itemsize

    @property
    def half(self) -> int:
        """Numbers in the keys of one block of one layer, and again in its values. Scales count as the bytes they take."""
        scale = SCALE_BYTES if self.dtype == "int8" else 0
        return self.kv_heads * (self.head_dim + scale) * self.block_size

    @property
    def block_numbers(self) -> int:
        return self.layers * 2 * self.half

    @property
    def block_bytes(self) -> int:
        return self.block_numbers * self.itemsize

    def nbytes(self, blocks: int) -> int:
        return HEADER_BYTES + blocks * self.block_bytes

    def fingerprint(self) -> bytes:
        words = (self.layers, self.kv_heads, self.head_dim, self.block_size, self.dtype)
        return sha256(f"{MAGIC.decode()} block layer {ORDERS[self.dtype]} {words}".encode()).digest()


class PoolHandle(Struct, frozen=True, array_like=True):
    """How another process of the same user finds the pool, while the one that says this lives."""

    pid: int
    fd: int
    blocks: int
    fingerprint: bytes
    incarnation: bytes


class KVPool:
    """Made by exactly one process (`create`), seen by others (`attach`)."""

    def __init__(self, layout: KVLayout, blocks: int, fd: int, incarnation: bytes) -> None:
        self.layout = layout
        self.blocks = blocks
        self.fd = fd
        self.incarnation = incarnation
        "Which pool this is: a restarted worker that finds the same one may go on with what is in it."
        self._map: mmap.mmap | None = mmap.mmap(fd, layout.nbytes(blocks), mmap.MAP_SHARED)
        # Arrays hold the mapping, so that closing under a living one is an error and not a crash.
        numbers: NDArray[Any] = np.frombuffer(self._map, NUMPY_TYPES[layout.dtype], offset=HEADER_BYTES)
        heads, dim, size = layout.kv_heads, layout.head_dim, layout.block_size
        self.data = numbers.reshape(blocks, layout.block_numbers)
        "[block, everything]: what movers copy."
        if ORDERS[layout.dtype] == TURNED:
            self.keys = numbers.reshape(blocks, layout.layers, 2, heads, dim, size)[:, :, 0]
            "[block, layer, kv_head, head_dim, token]. Not of pairs and int8: these lie as only the kernels read them."
            self.values = numbers.reshape(blocks, layout.layers, 2, heads, size, dim)[:, :, 1]
            "[block, layer, kv_head, token, head_dim]."

    @classmethod
    def create(cls, layout: KVLayout, blocks: int) -> KVPool:
        """The memory is reserved now: a pool that does not fit fails here and not in the middle of a request."""
        if blocks < 1:
            raise InvalidConfig(f"a KV pool needs at least one block, not {blocks}")
        size, incarnation = layout.nbytes(blocks), os.urandom(16)
        free = main_memory().free_bytes
        if size > free:  # the kernel would not refuse: it would look for somebody to kill
            raise InvalidConfig(
                f"a KV pool of {size / GIB:.2f} GiB does not fit into {free / GIB:.2f} GiB: give it fewer blocks"
            )
        fd = _anonymous_file(size)
        try:
            os.pwrite(fd, HEADER.pack(MAGIC, layout.fingerprint(), blocks, incarnation), 0)
            return cls(layout, blocks, fd, incarnation)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, layout: KVLayout) -> KVPool:
        """The pool behind `fd`, which becomes ours. Refused unless its bytes mean what `layout` says."""
        magic, fingerprint, blocks, incarnation = HEADER.unpack(os.pread(fd, HEADER.size, 0).ljust(HEADER.size, b"\0"))
        if magic != MAGIC:
            raise ProtocolError("the file descriptor does not lead to a KV pool")
        if fingerprint != layout.fingerprint():
            raise ProtocolError(f"the KV pool has another layout than {layout}")
        if os.fstat(fd).st_size != layout.nbytes(blocks):
            raise ProtocolError(f"the KV pool says {blocks} blocks and has {os.fstat(fd).st_size} bytes")
        return cls(layout, blocks, fd, incarnation)

    def handle(self) -> PoolHandle:
        return PoolHandle(os.getpid(), self.fd, self.blocks, self.layout.fingerprint(), self.incarnation)

    @classmethod
    def attach_handle(cls, handle: PoolHandle, layout: KVLayout) -> KVPool:
        """Like `attach`, without having been passed the descriptor. Process numbers are reused, incarnations are not."""
        try:
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ProtocolError(f"the KV pool of process {handle.pid} cannot be opened: {error.strerror}") from error
        try:
            pool = cls.attach(fd, layout)
        except BaseException:
            os.close(fd)
            raise
        if pool.incarnation != handle.incarnation:
            pool.close()
            raise ProtocolError(f"process {handle.pid} has another KV pool than the one announced")
        return pool

    def close(self) -> None:
        """Unmap and forget the descriptor. Arrays and tensors made of the pool must be gone: their memory would be."""
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
        state = "closed" if self._map is None else f"{self.layout.nbytes(self.blocks) / 2**20:.1f} MiB"
        return f"<KVPool {self.blocks} blocks of {self.layout.block_size} tokens, {state}>"


def _anonymous_file(size: int) -> int:
    fd = _open_anonymous()
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


def _open_anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:  # without memfd: a file that has no name any more
        return os.dup(file.fileno())


def _reserve(fd: int, size: int) -> None:
    os.ftruncate(fd, size)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
