"""Digests of instances in the simulator: true ones, and those of an instance that lies.

A wrong digest costs time, never an answer: all other checks hold with it, too. With true ones every router knows at rest
exactly what each instance has (70).
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.cluster.router import Router
from baton.core.kv.block_hash import BlockHasher
from baton.core.kv.digest import CacheDigest, DigestFeed
from baton.core.kv.marks import KEY_BYTES, marks_of
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockKey
from baton.protocol.instance import CachedKeys
from baton.sim.scenario import Scenario

KEYS_MAX = 16
"""Keys in one message: few, so that snapshots need several messages."""


class SimulatedFeed:
    """The feed of one session, true or false as the scenario says."""

    __slots__ = ("_feed", "_kind", "_made_up")

    def __init__(self, digest: CacheDigest, scenario: Scenario, identity: bytes) -> None:
        self._feed = DigestFeed(digest)
        self._kind = scenario.digests
        self._made_up = false_digest(scenario, identity) if self._kind == "made up" else b""

    def next(self) -> CachedKeys | None:
        message = self._feed.next(KEYS_MAX)
        if message is None:
            return None
        if self._kind == "no removals":
            return replace(message, removed=b"")
        return replace(message, added=message.added + self._made_up) if message.whole else message


def false_digest(scenario: Scenario, identity: bytes) -> bytes:
    """Digest of an instance that lies: the marked blocks of every prompt, of which it has at most a few."""
    hasher, found = BlockHasher(identity, scenario.block_size), b""
    for client in scenario.clients:
        keys: list[BlockKey] = []
        hasher.extend(keys, hasher.root(client.salt.encode()), client.prompt, len(client.prompt) // scenario.block_size)
        found += b"".join(key.to_bytes(KEY_BYTES) for _, key in marks_of(keys))
    return found


def is_known(router: Router, name: str, digest: CacheDigest) -> bool:
    """Whether the router knows exactly the keys of this instance's digest, up to the number that it may keep."""
    index, instance = router.membership.index, router.membership.names[name]
    if index.cut:
        return True
    return sorted(index.confirmed(instance.number)) == sorted(int.from_bytes(key) for key in digest.keys())  # noqa: SIM118


def check_known(router: Router, name: str, digest: CacheDigest) -> None:
    if not is_known(router, name, digest):
        known = len(router.membership.index.confirmed(router.membership.names[name].number))
        raise InvariantBroken(f"a router knows {known} keys of {name}, which has {len(digest)}", invariant=70)
