"""The bytes of a stored block, the same on every backend: a header of 128 bytes, then the payload.

    magic 8 | version 2 | header bytes 2 | rank 4 | key 32 | layout 32
    payload bytes 8 | payload digest 16 | identity 8 | header digest 16

An object describes itself. A reader names the wanted key and layout, and uses the payload only if header and payload are
complete and match: bit flips, torn and short writes, objects of another key, model or rank are all misses. The identity is its
first bytes, or zeros if it is not known.

Digests are XXH3-128. They detect accidents, not attacks: an attacker who can write to the store can also write a matching
digest.
"""

from __future__ import annotations

from struct import Struct
from typing import Literal

from xxhash import xxh3_128_digest

from baton.kvcache.storage.backend import LABEL_BYTES, LayoutName

MAGIC, VERSION = b"BATON-KV", 1
_FIELDS = Struct("<8sHHI32s32sQ16s8s")
HEADER_BYTES = _FIELDS.size + 16

Fault = Literal["magic", "version", "header", "key", "layout", "length", "payload"]
"""Faults of an object, in the order of the checks."""


def seal(key: bytes, layout: LayoutName, payload: memoryview) -> bytes:
    """Header for this payload."""
    digest, rank, identity = xxh3_128_digest(payload), layout.rank, layout.identity[:LABEL_BYTES]
    fields = _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, rank, key, layout.fingerprint, payload.nbytes, digest, identity)
    return fields + xxh3_128_digest(fields)


def fault_of(header: bytes | bytearray | memoryview, key: bytes, layout: LayoutName, payload: memoryview) -> Fault | None:
    """The fault of these bytes as the object of that key and layout. None: they are exactly what `seal` would write."""
    sealed = seal(key, layout, payload)
    return None if header == sealed else _difference(header, sealed)


def _difference(header: bytes | bytearray | memoryview, sealed: bytes) -> Fault:
    fault = header_fault(header)
    if fault is not None:
        return fault
    _, _, _, rank, key, fingerprint, length, _, identity = _FIELDS.unpack_from(header)
    _, _, _, wanted_rank, wanted_key, wanted_fingerprint, wanted_length, _, wanted_identity = _FIELDS.unpack_from(sealed)
    if key != wanted_key:
        return "key"
    if (fingerprint, rank, identity) != (wanted_fingerprint, wanted_rank, wanted_identity):
        return "layout"
    return "length" if length != wanted_length else "payload"


def header_fault(header: bytes | bytearray | memoryview) -> Fault | None:
    if len(header) != HEADER_BYTES:
        return "length"
    if header[:8] != MAGIC:
        return "magic"
    if xxh3_128_digest(header[: _FIELDS.size]) != header[_FIELDS.size :]:
        return "header"
    _, version, header_bytes, *_ = _FIELDS.unpack_from(header)
    return None if (version, header_bytes) == (VERSION, HEADER_BYTES) else "version"


def described(header: bytes) -> tuple[bytes, LayoutName]:
    """Key and layout in a header without a fault. For tools that inspect objects of unknown layouts."""
    _, _, _, rank, key, fingerprint, length, _, identity = _FIELDS.unpack_from(header)
    known = identity if any(identity) else b""
    return key, LayoutName(fingerprint=fingerprint, block_bytes=length, rank=rank, identity=known)
