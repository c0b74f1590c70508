"""The digest of a cache: kept by publish and evict, sent in bounded parts, whole again for a feed that is behind."""

from __future__ import annotations

from random import Random

import pytest

from baton.core.kv.block_pool import BlockPool
from baton.core.kv.digest import DEVICE, HOST, CacheDigest, DigestFeed
from baton.core.kv.eviction import POLICIES
from baton.core.kv.host_tier import HostTier
from baton.core.kv.marks import KEY_BYTES, is_mark
from baton.core.kv.prefix_cache import PrefixCache
from baton.protocol.ids import BlockKey


class Receiver:
    """A router's end of a feed."""

    def __init__(self):
        self.keys, self.wholes, self.largest = {}, 0, 0

    def take(self, message):
        parts = [message.added, message.removed]
        added, removed = [[part[at : at + KEY_BYTES] for at in range(0, len(part), KEY_BYTES)] for part in parts]
        self.largest = max(self.largest, len(added) + len(removed))
        self.wholes += message.whole
        if message.whole:
            self.keys.clear()
        for key in removed:
            self.keys.pop(key, None)
        self.keys.update(dict.fromkeys(added))

    def read(self, feed, keys_max=4096):
        while (message := feed.next(keys_max)) is not None:
            self.take(message)


def key(name, place):
    return BlockKey(f"{name:03}{place:03}".encode() * 6)


class Cache:
    """A prefix cache and a host tier with a digest, and what it must be."""

    def __init__(self, blocks, changes_max=1000):
        self.host = HostTier(blocks)
        self.cache = PrefixCache(BlockPool(blocks), POLICIES["lru"])
        self.digest = self.cache.digest = self.host.digest = CacheDigest(changes_max, self.host.__contains__)

    def compute(self, name, blocks):
        keys = [key(name, place) for place in range(blocks)]
        hit = self.cache.match(keys, blocks)
        table = self.cache.acquire(keys[:hit])
        table += self.cache.take(blocks - hit)
        for place in range(hit, blocks):
            self.cache.publish(keys, table, place)
        self.cache.release(table)

    def store(self, name, place):
        (block,) = self.host.take(1)
        self.host.insert(key(name, place), block, marked=is_mark(place + 1))

    def wanted(self):
        """Marked blocks of both tiers, from the keys alone."""
        every = [*self.cache.index(), *self.host.index()]
        return {each[:KEY_BYTES] for each in every if is_mark(int(each[3:6]) + 1)}

    def check(self):
        self.digest.check(self.cache.marked_keys(), self.host.index())


@pytest.mark.parametrize("seed", range(4))
def test_feeds_have_what_the_tiers_have(seed):
    """Chains are computed, evicted and copied to the host; two routers read at their own pace."""
    rng, tiers = Random(seed), Cache(200, changes_max=10 if seed % 2 else 1000)
    feeds = [DigestFeed(tiers.digest) for _ in range(2)]
    routers = [Receiver(), Receiver()]
    for _ in range(200):
        roll = rng.random()
        if roll < 0.5:
            tiers.compute(rng.randrange(12), rng.randrange(1, 100))
        elif roll < 0.7:
            tiers.store(rng.randrange(12), rng.choice((0, 1, 2, 3, 7, 31, 32, 63)))
        elif roll < 0.8:
            tiers.cache.evict(rng.randrange(100))
        elif roll < 0.82:
            tiers.host.forget()
        elif roll < 0.84:
            tiers.cache.clear()
        tiers.check()
        assert {*tiers.digest.keys()} == tiers.wanted()
        for feed, router in zip(feeds, routers, strict=True):
            if rng.random() < 0.3:
                router.read(feed, keys_max=rng.choice((3, 4096)))
                assert router.keys.keys() == tiers.wanted()


def test_a_message_is_bounded_and_a_snapshot_continues():
    tiers, router = Cache(4000), Receiver()
    for name in range(100):
        tiers.compute(name, 16)
    feed = DigestFeed(tiers.digest)
    router.take(feed.next(64))
    tiers.compute(100, 16)
    tiers.cache.evict(16)
    router.read(feed, 64)
    assert (router.wholes, router.largest) == (1, 64)
    assert router.keys.keys() == tiers.wanted()


def test_a_feed_that_is_behind_begins_anew():
    tiers, router = Cache(400, changes_max=50), Receiver()
    feed = DigestFeed(tiers.digest)
    router.read(feed)
    for name in range(400):
        tiers.compute(name, 8)
    router.read(feed)
    assert router.wholes == 2
    assert router.keys.keys() == tiers.wanted()
    assert feed.next() is None


def test_a_key_that_both_tiers_have_is_removed_with_the_last():
    tiers = Cache(64)
    tiers.compute(1, 1)
    tiers.store(1, 0)
    tiers.digest.remove(key(1, 0), DEVICE)
    assert len(tiers.digest) == 1
    tiers.digest.remove(key(1, 0), HOST)
    assert len(tiers.digest) == 0
    tiers.digest.remove(key(1, 0), HOST)
    assert len(tiers.digest) == 0


def test_a_block_fetched_from_storage_counts_when_it_is_loaded():
    tiers = Cache(64)
    (block,) = tiers.host.take(1)
    tiers.host.insert(key(1, 0), block, stored=True)
    assert len(tiers.digest) == 0
    tiers.compute(1, 1)
    tiers.cache.evict(1)
    assert len(tiers.digest) == 1, "the host tier has it still"
    tiers.check()
