"""What must not grow with the pool: fast ways do what the slow and obvious ones do, with few operations."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.kv import prefix_cache
from baton.core.kv.block_pool import BlockPool
from baton.core.kv.eviction import lfu, lru
from baton.core.kv.host_tier import HostTier
from baton.core.kv.prefix_cache import NO_PARENT, PrefixCache
from baton.errors import InvariantBroken

HISTORY = st.lists(
    st.tuples(st.sampled_from(["add", "branch", "hit", "evict"]), st.integers(0, 7), st.integers(1, 5)), max_size=40
)


def cache_after(history, policy=lru, blocks: int = 64) -> PrefixCache:
    """Chains that came, grew branches, were found again and were evicted. Nothing is held at the end."""
    cache = PrefixCache(BlockPool(blocks), policy)
    chains: list[list[bytes]] = [[] for _ in range(8)]
    for step, (act, which, length) in enumerate(history):
        chain = chains[which]
        matched = cache.match(chain, len(chain))
        if act == "evict":
            cache.evict(length)
        elif act == "hit":
            cache.release(cache.acquire(chain[:matched]))
        else:
            start = chain[:matched] if act == "branch" else []
            keys = [*start, *(b"%d.%d" % (step, place) for place in range(length))]
            table = cache.acquire(start)
            if cache.available < length:
                cache.release(table)
                continue
            table += cache.take(length)
            for place in range(len(start), len(keys)):
                cache.publish(keys, table, place)
            chains[which] = keys
            cache.release(table)
    cache.check()
    return cache


def coldest_naive(cache: PrefixCache, count: int) -> list[int]:
    """All leaves in order, each with its parents, from scratch."""
    found: list[int] = []
    for leaf in cache.eviction_order():
        block = leaf
        while block != NO_PARENT and block not in found and cache.pool.is_idle(block) and len(found) < count:
            found.append(block)
            block = cache._parent[block]
    return found


@settings(max_examples=settings.default.max_examples * 15 // 4, deadline=None)
@given(HISTORY, st.sampled_from([lru, lfu]), st.integers(1, 20))
def test_the_coldest_blocks_are_those_of_the_slow_way(history, policy, count):
    cache = cache_after(history, policy)
    for _ in range(2):  # asking changes nothing
        assert [block for _, block in cache.coldest(count)] == coldest_naive(cache, count)
        assert all(cache.block_of(key) == block for key, block in cache.coldest(count))
        cache.check()
    order = cache.eviction_order()
    assert order[:1] == ([] if not order else [coldest_naive(cache, 1)[0]])


@settings(max_examples=settings.default.max_examples * 5 // 2, deadline=None)
@given(HISTORY, st.sampled_from([lru, lfu]))
def test_a_cleared_cache_is_one_from_which_all_was_evicted(history, policy):
    cache = cache_after(history, policy)
    naive = deepcopy(cache)
    naive.evict(len(naive))
    cache.clear()
    cache.check()
    cache.pool.check({}, {})
    assert len(cache) == len(naive) == 0
    assert (cache.evicted, cache.changes) == (naive.evicted, naive.changes)
    assert sorted(cache.pool._free) == sorted(naive.pool._free)
    assert cache.pool.generations() == naive.pool.generations()
    assert cache._parent == naive._parent
    assert cache._children == naive._children


def test_a_cache_of_which_something_is_held_is_not_cleared():
    cache = cache_after([("add", 1, 4), ("add", 2, 2)])
    first = next(iter(cache.index()))
    held = cache.acquire([first])
    with pytest.raises(InvariantBroken, match=f"while block {held[0]} is held"):
        cache.clear()
    cache.check()


class Counted:
    """Heap operations of the cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operations = 0
        for name in ("heappop", "heappush", "heapify"):
            monkeypatch.setattr(prefix_cache, name, self._counting(getattr(prefix_cache, name)))

    def _counting(self, work):
        def counted(*arguments):
            self.operations += 1
            return work(*arguments)

        return counted


def many_leaves(leaves: int) -> PrefixCache:
    cache = PrefixCache(BlockPool(leaves), lru)
    for number in range(leaves):
        table = cache.take(1)
        cache.publish([b"%d" % number], table, 0)
        cache.release(table)
    return cache


@pytest.mark.parametrize("leaves", [200, 5000])
def test_operations_do_not_grow_with_the_pool(monkeypatch, leaves):
    cache = many_leaves(leaves)
    counted = Counted(monkeypatch)
    assert len(cache.coldest(64)) == 64
    assert counted.operations == 128
    cache.clear()
    assert counted.operations == 128, "no block is evicted by itself"


def test_stale_entries_are_looked_at_once(monkeypatch):
    cache = many_leaves(300)
    for number in range(250):
        cache.release(cache.acquire([b"%d" % number]))  # its old entry, which is before all others, is stale
    counted = Counted(monkeypatch)
    cache.coldest(10)
    cache.coldest(10)
    assert counted.operations <= 250 + 40


class Keys(dict):
    """Counts how many keys are walked over."""

    walked = 0

    def __iter__(self):
        for key in super().__iter__():
            Keys.walked += 1
            yield key


def test_host_blocks_that_storage_has_are_not_looked_at():
    host = HostTier(1000)
    for number, block in enumerate(host.take(1000)):
        host.insert(b"%d" % number, block, stored=number < 990)
    host._unstored = Keys(host._unstored)
    assert host.oldest_unstored(4) == [b"990", b"991", b"992", b"993"]
    assert Keys.walked <= 5
    host.touch([b"990", b"991"])
    assert host.oldest_unstored(2) == [b"992", b"993"]


# A part of the proof


@settings(max_examples=settings.default.max_examples * 3 // 2, deadline=None)
@given(HISTORY)
def test_the_parts_of_a_check_pass_where_the_whole_does(history):
    cache = cache_after(history)
    for begin in range(0, 64, 10):
        cache.check_part(begin, begin + 10)
        cache.pool.check_part(begin, begin + 10, {}, {})


def check_all(cache: PrefixCache) -> None:
    cache.check_part(0, 64)
    cache.pool.check_part(0, 64, {}, {})


def broken_ways(cache: PrefixCache):
    block = next(iter(cache.index().values()))
    yield "key", lambda: cache._key_of.__setitem__(block, b"other")
    yield "lost", lambda: cache.pool._free.pop()
    yield "held", lambda: cache.pool._requests.__setitem__(block, 1)
    yield "pinned", lambda: cache.pool._moves.__setitem__(block, 1)


@pytest.mark.parametrize("way", ["key", "lost", "held", "pinned"])
def test_a_part_of_the_check_finds_what_is_broken_in_it(way):
    cache = cache_after([("add", 1, 4), ("branch", 1, 2)])
    dict(broken_ways(cache))[way]()
    with pytest.raises(InvariantBroken):
        check_all(cache)
