"""Digest of an instance's cache for its routers: the short keys of marked blocks (marks.py) on the device and in the host tier.

    prefix cache, host tier --add, remove--> CacheDigest --changes--> DigestFeed, one per session --CachedKeys--> router

A feed begins with all keys (`whole`) and continues with changes, a bounded number per message. A feed that is further behind
than the remembered changes begins anew. Nothing is scanned: the cost of a change does not depend on how much is cached. A block
that was fetched from storage counts when it is loaded to the device: only there its place is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from baton.core.kv.marks import KEY_BYTES
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockKey
from baton.protocol.instance import CACHED_KEYS_MAX, CachedKeys

DEVICE: Final = 1
HOST: Final = 2


class CacheDigest:
    __slots__ = ("_changes", "_changes_max", "_first", "_held", "_in_host")

    def __init__(self, changes_max: int, in_host: Callable[[BlockKey], bool] = lambda key: False) -> None:
        """`changes_max`: changes that are remembered for feeds that are behind, at least."""
        self._in_host = in_host
        "Whether the host tier has this block."
        self._held: dict[bytes, int] = {}
        "Tiers that have each marked block, as bits."
        self._changes: list[bytes] = []
        "Keys that were added or removed, oldest first."
        self._first = 0
        "Number of the first remembered change."
        self._changes_max = changes_max

    def __len__(self) -> int:
        return len(self._held)

    # Changes

    def add(self, key: BlockKey) -> None:
        """Record that the device has this marked block from now on. The host tier may have had it before its place was
        known."""
        self._add(key[:KEY_BYTES], DEVICE | HOST if self._in_host(key) else DEVICE)

    def add_to_host(self, key: BlockKey, *, marked: bool) -> None:
        """Record that the host tier has this block from now on. `marked`: its place is marked, as far as is known."""
        short = key[:KEY_BYTES]
        if marked or short in self._held:
            self._add(short, HOST)

    def _add(self, short: bytes, tier: int) -> None:
        tiers = self._held.get(short, 0)
        self._held[short] = tiers | tier
        if not tiers:
            self._change(short)

    def remove(self, key: BlockKey, tier: int) -> None:
        """Record that the tier has dropped this block. Blocks without a mark are ignored."""
        short = key[:KEY_BYTES]
        tiers = self._held.get(short, 0)
        if tiers & ~tier:
            self._held[short] = tiers & ~tier
        elif tiers:
            del self._held[short]
            self._change(short)

    def clear(self, tier: int) -> None:
        """Clear the tier. Every feed begins anew."""
        self._held = {key: tiers & ~tier for key, tiers in self._held.items() if tiers & ~tier}
        self._first += len(self._changes) + 1
        self._changes.clear()

    def _change(self, short: bytes) -> None:
        self._changes.append(short)
        if len(self._changes) > 2 * self._changes_max:
            del self._changes[: self._changes_max]
            self._first += self._changes_max

    # Queries

    @property
    def first(self) -> int:
        return self._first

    @property
    def end(self) -> int:
        """Number of the next change."""
        return self._first + len(self._changes)

    def keys(self) -> list[bytes]:
        return list(self._held)

    def changed(self, start: int, count: int) -> list[bytes]:
        """Changes from number `start` on, at most `count`."""
        return self._changes[start - self._first : start - self._first + count]

    def has(self, short: bytes) -> bool:
        return short in self._held

    def check(self, marked: Iterable[BlockKey], host: Iterable[BlockKey]) -> None:
        """69: the digest has the marked blocks of the device (`marked`), and of the host tier no other than these (`host`)."""
        on_device, on_host = [dict.fromkeys(key[:KEY_BYTES] for key in keys) for keys in (marked, host)]
        held = [key for key, tiers in self._held.items() if tiers & DEVICE]
        if sorted(held) != sorted(on_device):
            raise InvariantBroken(f"the digest has {len(held)} keys of the device, the device {len(on_device)}", invariant=69)
        for key, tiers in self._held.items():
            if (tiers & HOST and key not in on_host) or (not tiers & HOST and key in on_host):
                raise InvariantBroken("digest and host tier disagree about a key", invariant=69)


class DigestFeed:
    """The digest for one router."""

    __slots__ = ("_digest", "_next", "_sent", "_snapshot")

    def __init__(self, digest: CacheDigest) -> None:
        self._digest = digest
        self._next = -1
        "Number of the next change to send."
        self._snapshot: list[bytes] = []
        self._sent = 0
        "Number of keys of the snapshot that were sent."

    def next(self, keys_max: int = CACHED_KEYS_MAX) -> CachedKeys | None:
        """The next message. None: the router knows everything."""
        digest, whole = self._digest, self._next < self._digest.first
        if whole:
            self._snapshot, self._sent, self._next = digest.keys(), 0, digest.end
        if whole or self._sent < len(self._snapshot):
            part = self._snapshot[self._sent : self._sent + keys_max]
            self._sent += len(part)
            if self._sent == len(self._snapshot):
                self._snapshot, self._sent = [], 0
            return CachedKeys(whole, b"".join(part))
        changed = digest.changed(self._next, keys_max)
        if not changed:
            return None
        self._next += len(changed)
        unique = dict.fromkeys(changed)
        added = b"".join(key for key in unique if digest.has(key))
        return CachedKeys(added=added, removed=b"".join(key for key in unique if not digest.has(key)))
