"""The few calls of NVIDIA's driver that a KV pool needs, by ctypes: memory behind a file descriptor, its mapping, copies.

Torch is not used: the cache service copies blocks and never computes, and would pay seconds and gigabytes for it. Mappings
belong to the process, so a tensor of torch can be laid over them (worker/attention/pool_tensors.py).

Memory lives as long as any process maps it or holds a descriptor of it, even after its creator has ended: the same rule as for
a memfd.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import Structure, byref, c_char, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from functools import cache
from typing import Any, Final
from uuid import UUID

from baton.errors import DeviceError

PORTABLE: Final = 1
NON_BLOCKING: Final = 1
PINNED_MEMORY: Final = 1
ON_DEVICE: Final = 1
DESCRIPTOR: Final = 1
"""Handle type by which memory is shared: a POSIX file descriptor."""
DESCRIPTORS_SUPPORTED: Final = 103
"""Device attribute that shows whether its memory can be shared by descriptor."""
READ: Final = 1
READ_WRITE: Final = 3


class Location(Structure):
    _fields_ = (("type", c_int), ("device", c_int))


class AllocationFlags(Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class AllocationProperties(Structure):
    """CUDA's CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("windows_only", c_void_p),
        ("flags", AllocationFlags),
    )


class AccessDescription(Structure):
    """CUDA's CUmemAccessDesc."""

    _fields_ = (("location", Location), ("access", c_int))


class DeviceUuid(Structure):
    _fields_ = (("bytes", c_char * 16),)


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"there is no NVIDIA driver here: {error}") from None


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises DeviceError with the driver's own text."""
    library = _library()
    code = getattr(library, name)(*arguments)
    if code:
        words = ctypes.c_char_p()
        library.cuGetErrorString(code, byref(words))
        raise DeviceError(f"{name}: {(words.value or b'unknown error').decode()} ({code})")


@cache
def _primary_context(device: int) -> c_void_p:
    context, number = c_void_p(), c_int()
    call("cuInit", 0)
    call("cuDeviceGet", byref(number), device)
    call("cuDevicePrimaryCtxRetain", byref(context), number)
    return context


def use_device(device: int) -> None:
    """Bind this thread's calls to that device."""
    call("cuCtxSetCurrent", _primary_context(device))


# GPUs


def device_count() -> int:
    """Number of GPUs that this process may use: CUDA_VISIBLE_DEVICES is respected."""
    count = c_int()
    call("cuInit", 0)
    call("cuDeviceGetCount", byref(count))
    return count.value


def can_read_peer(device: int, peer: int) -> bool:
    """Whether that device may read the memory of the other one directly."""
    answer, numbers = c_int(), (c_int(), c_int())
    call("cuInit", 0)
    for number, index in zip(numbers, (device, peer), strict=True):
        call("cuDeviceGet", byref(number), index)
    call("cuDeviceCanAccessPeer", byref(answer), *numbers)
    return bool(answer.value)


def uuid_of(device: int) -> str:
    """UUID of a GPU, which is the same in every process, whatever the GPU's number is there."""
    found, number = DeviceUuid(), c_int()
    call("cuInit", 0)
    call("cuDeviceGet", byref(number), device)
    call("cuDeviceGetUuid_v2", byref(found), number)
    return str(UUID(bytes=bytes(found)))


def device_with(uuid: str) -> int | None:
    """Number of the GPU in this process. None: this process does not see it."""
    return next((device for device in range(device_count()) if uuid_of(device) == uuid), None)


# Memory shared as a descriptor


def granularity(device: int) -> int:
    """Bytes of which sizes of memory are multiples."""
    size, properties = c_size_t(), _properties(device)
    call("cuMemGetAllocationGranularity", byref(size), byref(properties), 0)
    return size.value


def create_memory(nbytes: int, device: int) -> int:
    """A handle of new memory. The caller must release it, also once the memory is mapped."""
    _require_descriptors(device)
    handle, properties = c_uint64(), _properties(device)
    call("cuMemCreate", byref(handle), c_size_t(nbytes), byref(properties), c_uint64(0))
    return handle.value


def export_memory(handle: int) -> int:
    """A descriptor that shares the memory with other processes and keeps it alive. Child programs do not inherit it."""
    fd = c_int(-1)
    call("cuMemExportToShareableHandle", byref(fd), c_uint64(handle), DESCRIPTOR, c_uint64(0))
    os.set_inheritable(fd.value, False)
    return fd.value


def import_memory(fd: int) -> int:
    """A handle of the memory behind the descriptor, which the caller keeps."""
    handle = c_uint64()
    call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), DESCRIPTOR)
    return handle.value


def release_memory(handle: int) -> None:
    """Release a handle. Mappings stay valid."""
    call("cuMemRelease", c_uint64(handle))


def map_memory(handle: int, nbytes: int, device: int, *, read_only: bool) -> int:
    """Map the memory and return its address. A write through a read-only mapping ends the writer's own context and changes
    nothing."""
    address = c_uint64()
    call("cuMemAddressReserve", byref(address), c_size_t(nbytes), c_size_t(0), c_uint64(0), c_uint64(0))
    try:
        call("cuMemMap", address, c_size_t(nbytes), c_size_t(0), c_uint64(handle), c_uint64(0))
        try:
            access = AccessDescription(Location(ON_DEVICE, device), READ if read_only else READ_WRITE)
            call("cuMemSetAccess", address, c_size_t(nbytes), byref(access), c_size_t(1))
        except BaseException:
            call("cuMemUnmap", address, c_size_t(nbytes))
            raise
    except BaseException:
        call("cuMemAddressFree", address, c_size_t(nbytes))
        raise
    return address.value


def unmap_memory(address: int, nbytes: int) -> None:
    call("cuMemUnmap", c_uint64(address), c_size_t(nbytes))
    call("cuMemAddressFree", c_uint64(address), c_size_t(nbytes))


def _properties(device: int) -> AllocationProperties:
    return AllocationProperties(PINNED_MEMORY, DESCRIPTOR, Location(ON_DEVICE, device))


def _require_descriptors(device: int) -> None:
    supported = c_int()
    call("cuDeviceGetAttribute", byref(supported), DESCRIPTORS_SUPPORTED, c_int(device))
    if not supported.value:
        raise DeviceError("this GPU's driver cannot share memory as a file descriptor, which a KV pool on a GPU needs")


# Copies


def register_host(address: int, nbytes: int) -> None:
    """Pin memory of this process: copies to and from it then run at full speed, and beside other work."""
    call("cuMemHostRegister_v2", c_void_p(address), c_size_t(nbytes), PORTABLE)


def unregister_host(address: int) -> None:
    call("cuMemHostUnregister", c_void_p(address))


def memory_info() -> tuple[int, int]:
    """Bytes of this thread's device, (free, total)."""
    free_bytes, total = c_size_t(), c_size_t()
    call("cuMemGetInfo_v2", byref(free_bytes), byref(total))
    return free_bytes.value, total.value


class CopyStream:
    """Stream of copies, in order, beside the device's other work. `wait` returns when they are done."""

    def __init__(self) -> None:
        self._stream = c_void_p()
        call("cuStreamCreate", byref(self._stream), NON_BLOCKING)

    def to_device(self, target: int, source: int, nbytes: int) -> None:
        call("cuMemcpyHtoDAsync_v2", c_uint64(target), c_void_p(source), c_size_t(nbytes), self._stream)

    def to_host(self, target: int, source: int, nbytes: int) -> None:
        call("cuMemcpyDtoHAsync_v2", c_void_p(target), c_uint64(source), c_size_t(nbytes), self._stream)

    def on_device(self, target: int, source: int, nbytes: int) -> None:
        call("cuMemcpyDtoDAsync_v2", c_uint64(target), c_uint64(source), c_size_t(nbytes), self._stream)

    def wait(self) -> None:
        call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        call("cuStreamDestroy_v2", self._stream)
