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
from typing import Final, Protocol

from xxhash import xxh3_128_digest

from baton.config import TransferDigest
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


class KeyedDigest:
    """Both sides count the pieces of their session."""

    def __init__(self, session_key: bytes) -> None:
        self._mac = hashlib.blake2b(key=hmac.digest(session_key, b"baton blocks", "sha256"), digest_size=32)
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
