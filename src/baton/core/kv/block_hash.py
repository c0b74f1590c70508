"""Keys of blocks: a SHA-256 chain over (parent, token ids, extra) whose root is the full fingerprint.

    root --+-- tokens 0..15 --> key 0 --+-- tokens 16..31 --> key 1 ...
    (fingerprint, salt)                 (parent = key 0)

Equal keys mean equal KV: the fingerprint is the worker's digest of everything except tokens that KV depends on
(worker/identity.py), the salt is the tenant's, and the tokens are the same at the same positions. All tiers use the same key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from struct import Struct

from baton.protocol.ids import BlockKey
from baton.protocol.request import Extra


def _joined(parts: Iterable[bytes]) -> bytes:
    """The parts as bytes, each with its length before it, so that no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


class BlockHasher:
    """Computes keys for one block size."""

    __slots__ = ("_pack", "block_size", "fingerprint")

    def __init__(self, fingerprint: bytes, block_size: int) -> None:
        self.fingerprint = fingerprint
        self.block_size = block_size
        self._pack = Struct(f"<{block_size}I").pack

    def root(self, salt: bytes, private: bytes = b"") -> BlockKey:
        """Root of a chain. `private` splits off a separate name space, for example for one request."""
        return BlockKey(sha256(_joined([b"baton.root.v1", self.fingerprint, salt, private])).digest())

    def key(self, parent: BlockKey, tokens: Sequence[int], extra: bytes = b"") -> BlockKey:
        """Key of one full block. `extra`: other input that the KV depends on, such as an image's digest."""
        return BlockKey(sha256(parent + self._pack(*tokens) + extra).digest())

    def extend(
        self, keys: list[BlockKey], root: BlockKey, tokens: Sequence[int], blocks: int, extras: Sequence[Extra] = ()
    ) -> None:
        """Extend `keys` to the first `blocks` full blocks of `tokens`. Never changes the token list."""
        size = self.block_size
        parent = keys[-1] if keys else root
        for block in range(len(keys), blocks):
            extra = self._extra_of(block, extras) if extras else b""
            parent = self.key(parent, tokens[block * size : (block + 1) * size], extra)
            keys.append(parent)

    def _extra_of(self, block: int, extras: Sequence[Extra]) -> bytes:
        """Digests of inputs that begin in this block, with their place in it. Later blocks depend on them through their
        parent."""
        first = block * self.block_size
        inside = [(position - first, digest) for position, digest in extras if 0 <= position - first < self.block_size]
        return _joined(part for place, digest in inside for part in (place.to_bytes(4, "little"), digest))
