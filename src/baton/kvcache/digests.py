"""Digests of KV bytes on their way between two machines. Each is sent in a sealed message (trust/seal.py) before its bytes.

    checksum   xxh3: finds damage, at the speed of memory. An attacker on the way can find other bytes with the same digest.
    keyed      a MAC with a key of the session: an attacker can only break the connection. It covers the number of the piece in
               the session and its first block too, so that bytes sent before, or of other blocks, are not accepted.

Inside TLS, which authenticates by itself, the checksum is used.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import struct
from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Final, Protocol

from xxhash import xxh3_128_digest

from baton.config import TransferDigest
from baton.errors import ProtocolError
from baton.repeats import printable
from baton.trust.stream import Stream

KEYED: Final = "keyed_digest"
"""The capability (protocol/versions.py)."""
_PLACE: Final = struct.Struct("!QQ")


class Digest(Protocol):
    def __call__(self, content: memoryview, first: int) -> bytes:
        """The digest of the next piece of the session, whose first block is this one."""
        ...


def checksum(content: memoryview, first: int) -> bytes:
    return xxh3_128_digest(content)


class Mac(Protocol):
    def copy(self) -> Mac: ...

    def update(self, content: memoryview | bytes, /) -> None: ...

    def digest(self) -> bytes: ...


ALGORITHMS: Final[dict[str, Callable[[bytes], Mac]]] = {
    "blake2b": lambda key: hashlib.blake2b(key=key, digest_size=32),
    "sha256": lambda key: hmac.new(key, digestmod="sha256"),
}


@cache
def fastest() -> str:
    """Name of the algorithm that is fastest here: HMAC-SHA256 where the processor has instructions for it, else BLAKE2b."""
    sample = bytes(256 * 1024)
    return min(ALGORITHMS, key=lambda name: min(_seconds(ALGORITHMS[name](bytes(32)), sample) for _ in range(3)))


def _seconds(mac: Mac, sample: bytes) -> float:
    begun = perf_counter()
    mac.update(sample)
    return perf_counter() - begun


class KeyedDigest:
    """Both sides count the pieces of their session."""

    def __init__(self, session_key: bytes, algorithm: str) -> None:
        """Raises ProtocolError if this build does not have the algorithm."""
        if algorithm not in ALGORITHMS:
            raise ProtocolError(f"keyed digests by an algorithm that this build does not have: {printable(algorithm)}")
        self._mac = ALGORITHMS[algorithm](hmac.digest(session_key, b"baton blocks", "sha256"))
        self._pieces = 0

    def __call__(self, content: memoryview, first: int) -> bytes:
        mac = self._mac.copy()
        mac.update(_PLACE.pack(self._pieces, first))
        mac.update(content)
        self._pieces += 1
        return mac.digest()


def wants_keyed(choice: TransferDigest, stream: Stream) -> bool:
    """Whether a reader asks for keyed digests. auto: unless the connection stays on this machine."""
    if stream.tls is not None or choice == "checksum":
        return False
    return choice == "keyed" or not ipaddress.ip_address(stream.sock.getpeername()[0].partition("%")[0]).is_loopback
