"""Stands for NVIDIA's driver where there is none, at the boundary of ctypes: memory of the "GPU" is a memfd.

It keeps the driver's rules that the pool depends on: memory lives for as long as a handle, a mapping or a descriptor of it,
in whatever process; sizes are multiples of the granularity; a mapping can be read-only; another GPU's memory is not seen.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from ctypes import c_char, c_int, c_size_t, c_uint64
from typing import Any

from baton.kvpool import cuda_driver

GRANULARITY = 2 << 20
INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED = 1, 2, 801
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_int64)
LIBC.mprotect.argtypes = (ctypes.c_void_p, c_size_t, c_int)
LIBC.munmap.argtypes = (ctypes.c_void_p, c_size_t)


def install(*, gpus: tuple[int, ...] = (0,), total_bytes: int = 1 << 30, descriptors: bool = True) -> FakeDriver:
    """For all that this process does from now on. `gpus`: which of the machine's GPUs it sees."""
    driver = FakeDriver(gpus, total_bytes, descriptors)
    cuda_driver._library = lambda: driver  # type: ignore[assignment, return-value]
    cuda_driver._primary_context.cache_clear()
    return driver


def _value(argument: Any) -> int:
    return int(getattr(argument, "value", argument) or 0)


class FakeDriver:
    def __init__(self, gpus: tuple[int, ...], total_bytes: int, descriptors: bool) -> None:
        self.gpus, self.total_bytes, self.descriptors = gpus, total_bytes, descriptors
        self.handles: dict[int, int] = {}
        "Descriptors by handle."
        self.mapped: dict[int, int] = {}
        "Bytes by address."
        self.calls: list[str] = []
        self._next = 1

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name}: the pool does not need it")

    def cuGetErrorString(self, code: int, words: Any) -> int:
        words._obj.value = {OUT_OF_MEMORY: b"out of memory"}.get(code, b"invalid argument")
        return 0

    # Devices

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, number: Any, device: int) -> int:
        number._obj.value = device
        return 0 if device < len(self.gpus) else INVALID_VALUE

    def cuDeviceCanAccessPeer(self, answer: Any, device: c_int, peer: c_int) -> int:
        answer._obj.value = int(device.value // 2 == peer.value // 2)  # GPUs are connected in pairs
        return 0

    def cuDeviceGetUuid_v2(self, uuid: Any, number: c_int) -> int:
        ctypes.memmove(ctypes.addressof(uuid._obj), bytes([0xB0 + self.gpus[number.value]]) * 16, 16)
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, number: c_int) -> int:
        assert attribute == cuda_driver.DESCRIPTORS_SUPPORTED
        value._obj.value = int(self.descriptors)
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, number: c_int) -> int:
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        used = sum(os.fstat(fd).st_size for fd in self.handles.values()) + sum(self.mapped.values())
        free._obj.value, total._obj.value = self.total_bytes - used, self.total_bytes
        return 0

    # Memory

    def cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: int) -> int:
        size._obj.value = GRANULARITY
        return 0

    def _new_handle(self, handle: Any, fd: int) -> int:
        handle._obj.value, self._next = self._next, self._next + 1
        self.handles[handle._obj.value] = fd
        return 0

    def cuMemCreate(self, handle: Any, nbytes: c_size_t, properties: Any, flags: c_uint64) -> int:
        asked = properties._obj
        assert (asked.type, asked.handle_types, asked.location.type) == (1, 1, 1)
        if nbytes.value % GRANULARITY:
            return INVALID_VALUE
        if nbytes.value > self.total_bytes:
            return OUT_OF_MEMORY
        fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes.value)
        return self._new_handle(handle, fd)

    def cuMemExportToShareableHandle(self, fd: Any, handle: c_uint64, kind: int, flags: c_uint64) -> int:
        fd._obj.value = os.dup(self.handles[handle.value])
        os.set_inheritable(fd._obj.value, True)  # the driver does not promise otherwise
        return 0

    def cuMemImportFromShareableHandle(self, handle: Any, fd: Any, kind: int) -> int:
        if not os.readlink(f"/proc/self/fd/{fd.value}").startswith("/memfd:fake-gpu"):
            return INVALID_VALUE
        return self._new_handle(handle, os.dup(fd.value))

    def cuMemRelease(self, handle: c_uint64) -> int:
        os.close(self.handles.pop(handle.value))
        return 0

    def cuMemAddressReserve(self, address: Any, nbytes: c_size_t, *rest: Any) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address._obj.value = LIBC.mmap(None, nbytes.value, 0, flags, -1, 0)
        return 0

    def cuMemMap(self, address: c_uint64, nbytes: c_size_t, offset: c_size_t, handle: c_uint64, flags: c_uint64) -> int:
        fd = self.handles[handle.value]
        if nbytes.value % GRANULARITY or nbytes.value > os.fstat(fd).st_size:
            return INVALID_VALUE
        fixed = mmap.MAP_SHARED | 0x10
        assert LIBC.mmap(address.value, nbytes.value, 0, fixed, fd, 0) == address.value
        self.mapped[address.value] = nbytes.value
        return 0

    def cuMemSetAccess(self, address: c_uint64, nbytes: c_size_t, access: Any, count: c_size_t) -> int:
        allowed = {1: mmap.PROT_READ, 3: mmap.PROT_READ | mmap.PROT_WRITE}[access._obj.access]
        return LIBC.mprotect(address.value, nbytes.value, allowed)

    def cuMemUnmap(self, address: c_uint64, nbytes: c_size_t) -> int:
        return 0 if self.mapped.pop(address.value) == nbytes.value else INVALID_VALUE

    def cuMemAddressFree(self, address: c_uint64, nbytes: c_size_t) -> int:
        return LIBC.munmap(address.value, nbytes.value)

    # Copies: done at once

    def cuMemHostRegister_v2(self, *arguments: Any) -> int:
        return 0

    def cuMemHostUnregister(self, address: Any) -> int:
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:
        return 0

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        return 0

    def _copy(self, target: Any, source: Any, nbytes: c_size_t, stream: Any) -> int:
        ctypes.memmove(_value(target), _value(source), nbytes.value)
        return 0

    cuMemcpyHtoDAsync_v2 = cuMemcpyDtoHAsync_v2 = cuMemcpyDtoDAsync_v2 = _copy


def fill(pool: Any, values: list[int]) -> None:
    """Block n holds values[n], in every byte."""
    for block, value in enumerate(values):
        ctypes.memset(pool.address + block * pool.layout.block_bytes, value, pool.layout.block_bytes)


def contents(pool: Any) -> list[int]:
    size = pool.layout.block_bytes
    found = [(c_char * size).from_address(pool.address + block * size).raw for block in range(pool.blocks)]
    assert all(len(set(one)) == 1 for one in found)
    return [one[0] for one in found]
