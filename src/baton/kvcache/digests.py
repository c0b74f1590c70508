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
from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter
from typing import Final, Protocol

from xxhash import xxh3_128

from baton.config import TransferDigest
from baton.errors import ProtocolError
from baton.repeats import printable
from baton.trust import gmac
from baton.trust.stream import SocketStream

KEYED: Final = "keyed_digest"
"""The capability (protocol/versions.py)."""
_PLACE: Final = struct.Struct("!QQ")


class Running(Protocol):
    """Interface of the digest of one piece, which is fed its bytes as they pass."""

    def update(self, content: memoryview | bytes, /) -> None: ...

    def digest(self) -> bytes: ...


Digest = Callable[[int], Running]
"""Begins the digest of the session's next piece. The argument is the piece's first block."""


def checksum(first: int) -> Running:
    return xxh3_128()


def _gmac(key: bytes) -> Callable[[int], Running]:
    mac = gmac.Gmac(key)
    return lambda piece: mac.start(piece.to_bytes(12, "big"))


IN_EVERY_BUILD: Final = ("blake2b", "sha256")
"""Algorithms that every build with keyed digests has."""
ALGORITHMS: Final[dict[str, Callable[[bytes], Callable[[int], Running]]]] = {
    "blake2b": lambda key: lambda piece: hashlib.blake2b(key=key, digest_size=32),
    "sha256": lambda key: lambda piece: hmac.new(key, digestmod="sha256"),
    **({"aes256-gmac": _gmac} if gmac.available() else {}),
}
"""MACs of pieces, by algorithm: made from the key of a session and the number of the piece."""


@cache
def ranked() -> tuple[str, ...]:
    """Names of the algorithms of this build, the fastest here first: GMAC where the processor has instructions for AES,
    HMAC-SHA256 where it has them for SHA, else BLAKE2b."""
    sample = bytes(256 * 1024)
    return tuple(sorted(ALGORITHMS, key=lambda name: min(_seconds(ALGORITHMS[name](bytes(32)), sample) for _ in range(3))))


def _seconds(begin: Callable[[int], Running], sample: bytes) -> float:
    begun = perf_counter()
    begin(0).update(sample)
    return perf_counter() - begun


def chosen(offered: Sequence[str], otherwise: str) -> str:
    """The algorithm of a session: the reader's best one that this build has. `otherwise`: for readers that offer none."""
    return next((name for name in offered if name in ALGORITHMS), otherwise)


class KeyedDigest:
    """Digests keyed by the session. Both sides count the pieces."""

    def __init__(self, session_key: bytes, algorithm: str) -> None:
        """Raises ProtocolError if this build does not have the algorithm."""
        if algorithm not in ALGORITHMS:
            raise ProtocolError(f"keyed digests by an algorithm that this build does not have: {printable(algorithm)}")
        self._begin = ALGORITHMS[algorithm](hmac.digest(session_key, b"baton blocks", "sha256"))
        self._pieces = 0

    def __call__(self, first: int) -> Running:
        running = self._begin(self._pieces)
        running.update(_PLACE.pack(self._pieces, first))
        self._pieces += 1
        return running


def wants_keyed(choice: TransferDigest, stream: SocketStream) -> bool:
    """Whether a reader wants keyed digests. auto: unless the connection stays on this machine."""
    if stream.tls is not None or choice == "checksum":
        return False
    return choice == "keyed" or not ipaddress.ip_address(stream.sock.getpeername()[0].partition("%")[0]).is_loopback
