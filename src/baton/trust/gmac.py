"""AES-256-GMAC, a MAC at several GiB per second, by the OpenSSL library that Python's ssl module loads: Python itself does not
expose it. A key must not see a nonce twice.

GMAC is AES-GCM (NIST SP 800-38D) with everything as associated data. Calls release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import ssl  # noqa: F401  loads libcrypto, under whatever path this Python has it: the name below then finds that one
import weakref
from ctypes import byref, c_char_p, c_int, c_void_p
from functools import cache
from typing import Any, Final

import numpy as np

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
NAMES: Final = ("libcrypto.so.3", "libcrypto.so.1.1")
_GET_TAG: Final = 0x10
"""OpenSSL's number of EVP_CTRL_AEAD_GET_TAG."""
_TYPES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "EVP_aes_256_gcm": (c_void_p, ()),
    "EVP_CIPHER_CTX_new": (c_void_p, ()),
    "EVP_CIPHER_CTX_free": (None, (c_void_p,)),
    "EVP_EncryptInit_ex": (c_int, (c_void_p, c_void_p, c_void_p, c_char_p, c_char_p)),
    "EVP_EncryptUpdate": (c_int, (c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "EVP_EncryptFinal_ex": (c_int, (c_void_p, c_void_p, c_void_p)),
    "EVP_CIPHER_CTX_ctrl": (c_int, (c_void_p, c_int, c_int, c_void_p)),
}


@cache
def _library() -> ctypes.CDLL | None:
    for name in NAMES:
        try:
            library = ctypes.CDLL(name)
            for function, (result, arguments) in _TYPES.items():
                getattr(library, function).restype = result
                getattr(library, function).argtypes = arguments
        except (OSError, AttributeError):
            continue
        return library
    return None


def available() -> bool:
    return _library() is not None


class Gmac:
    """MACs of one key, one after the other: `start` begins the next one and forgets the one before."""

    def __init__(self, key: bytes) -> None:
        library = _library()
        assert library is not None
        assert len(key) == KEY_BYTES
        self._library = library
        self._context = library.EVP_CIPHER_CTX_new()
        weakref.finalize(self, library.EVP_CIPHER_CTX_free, self._context)
        self._written, self._tag = c_int(), ctypes.create_string_buffer(TAG_BYTES)
        self._call("EVP_EncryptInit_ex", library.EVP_aes_256_gcm(), None, key, None)

    def start(self, nonce: bytes) -> Gmac:
        """Begin a MAC. `nonce`: 12 bytes."""
        self._call("EVP_EncryptInit_ex", None, None, None, nonce)
        return self

    def update(self, content: memoryview | bytes, /) -> None:
        address = np.frombuffer(content, np.uint8).ctypes.data
        self._call("EVP_EncryptUpdate", None, byref(self._written), address, len(content))

    def digest(self) -> bytes:
        self._call("EVP_EncryptFinal_ex", self._tag, byref(self._written))
        self._call("EVP_CIPHER_CTX_ctrl", _GET_TAG, TAG_BYTES, self._tag)
        return self._tag.raw

    def _call(self, function: str, *arguments: Any) -> None:
        if getattr(self._library, function)(self._context, *arguments) != 1:
            raise RuntimeError(f"OpenSSL: {function} failed")
