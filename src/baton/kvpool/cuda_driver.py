"""The few calls of NVIDIA's driver that a KV pool needs, by ctypes: memory, its export to other processes, copies.

Not through torch: the cache service copies blocks and never computes, and would pay seconds and gigabytes for it. Memory is
of the primary context, which is torch's too, so a tensor can be laid over it (worker/attention/pool_tensors.py).
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any, Final

from baton.errors import DeviceError

HANDLE_BYTES: Final = 64
LAZY_PEER_ACCESS: Final = 1
PORTABLE: Final = 1
NON_BLOCKING: Final = 1


class IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"there is no NVIDIA driver here: {error}") from None
    library.cuIpcOpenMemHandle_v2.argtypes = (c_void_p, IpcHandle, c_uint)
    return library


def call(name: str, *arguments: Any) -> None:
    """DeviceError, with the driver's own words, where it fails."""
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
    """This thread's calls are about that device from now on."""
    call("cuCtxSetCurrent", _primary_context(device))


def allocate(nbytes: int) -> int:
    address = c_uint64()
    call("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
    return address.value


def free(address: int) -> None:
    call("cuMemFree_v2", c_uint64(address))


def export(address: int) -> bytes:
    """What another process opens the memory by."""
    handle = IpcHandle()
    call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
    return bytes(handle)


def open_exported(handle: bytes) -> int:
    """Another process's memory. It stays mapped here when that process ends, until it is closed."""
    address = c_uint64()
    call("cuIpcOpenMemHandle_v2", byref(address), IpcHandle.from_buffer_copy(handle), LAZY_PEER_ACCESS)
    return address.value


def close_exported(address: int) -> None:
    call("cuIpcCloseMemHandle", c_uint64(address))


def register_host(address: int, nbytes: int) -> None:
    """Pins memory of this process: copies to and from it then go at full speed, and beside other work."""
    call("cuMemHostRegister_v2", c_void_p(address), c_size_t(nbytes), PORTABLE)


def unregister_host(address: int) -> None:
    call("cuMemHostUnregister", c_void_p(address))


def memory_info() -> tuple[int, int]:
    """(free, total) bytes of this thread's device."""
    free_bytes, total = c_size_t(), c_size_t()
    call("cuMemGetInfo_v2", byref(free_bytes), byref(total))
    return free_bytes.value, total.value


class CopyStream:
    """Copies in order, beside everything else that the device does. `wait` returns when they are done."""

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
