"""What must not grow with the pool: fast ways do what the slow and obvious ones do, with few operations."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import InstanceConfig, KVConfig, SchedulerConfig
from baton.core.events import ForgetCache
from baton.core.instance import Instance
from baton.core.kv import prefix_cache
from baton.core.kv.block_pool import BlockPool
from baton.core.kv.digest import CacheDigest
from baton.core.kv.eviction import lfu, lru
from baton.core.kv.host_tier import HostTier
from baton.core.kv.prefix_cache import NO_PARENT, PrefixCache
from baton.errors import InvariantBroken
from baton.protocol.control import OrderAnswer
from baton.protocol.ids import Instant

HISTORY = st.lists(
    st.tuples(st.sampled_from(["add", "branch", "hit", "evict"]), st.integers(0, 7), st.integers(1, 5)), max_size=40
)


def cache_after(history, policy=lru, blocks: int = 64, *, published: bool = False) -> PrefixCache:
    """Chains that came, grew branches, were found again and were evicted. Nothing is held at the end. `published`: with a
    digest."""
    cache = PrefixCache(BlockPool(blocks), policy)
    cache.digest = CacheDigest(KVConfig().digest_changes_max) if published else None
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


HELD = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), max_size=4)


def hold_some(cache: PrefixCache, held) -> None:
    """Hold the chains that end at some of the blocks, by requests and by moves."""
    blocks = sorted(cache.index().values())
    for which, of_a_move in held if blocks else ():
        chain, block = [], blocks[which % len(blocks)]
        while block != NO_PARENT:
            chain.insert(0, block)
            block = cache._parent[block]
        if of_a_move % 2:
            cache.pin(chain)
        else:
            cache.acquire([cache.key_of(block) for block in chain])


@settings(max_examples=settings.default.max_examples * 5 // 2, deadline=None)
@given(HISTORY, HELD, st.sampled_from([lru, lfu]), st.booleans())
def test_clearing_what_is_idle_is_evicting_it_block_by_block(history, held, policy, published):
    cache = cache_after(history, policy, published=published)
    hold_some(cache, held)
    naive = deepcopy(cache)
    assert cache.clear_idle() == naive.evict(len(naive))
    cache.check()
    cache.pool.check()
    assert cache.index() == naive.index()
    assert (cache.evicted, cache.changes, cache.pool.idle) == (naive.evicted, naive.changes, 0)
    assert sorted(cache.pool._free) == sorted(naive.pool._free)
    assert (cache._parent, cache._children, cache._depth) == (naive._parent, naive._children, naive._depth)
    if cache.digest is not None and naive.digest is not None:
        cache.digest.check(cache.marked_keys(), ())
        assert sorted(cache.digest.keys()) == sorted(naive.digest.keys())
    assert cache.clear_idle() == 0


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


@pytest.mark.parametrize("leaves", [200, 5000])
def test_clearing_beside_held_blocks_does_not_grow_with_the_pool(monkeypatch, leaves):
    cache = many_leaves(leaves)
    held = cache.acquire([b"3", b"5"])
    counted = Counted(monkeypatch)
    assert cache.clear_idle() == leaves - 2
    assert counted.operations == 0, "no block is evicted by itself"
    assert list(cache.index().values()) == held


@pytest.mark.parametrize("held", [0, 1])
def test_an_order_to_clear_the_cache_evicts_no_block_by_itself(monkeypatch, held):
    instance = Instance(InstanceConfig(kv=KVConfig(blocks=300), scheduler=SchedulerConfig(slots=2)))
    instance.board.cache = many_leaves(300)
    instance.board.cache.acquire([b"%d" % number for number in range(held)])
    counted = Counted(monkeypatch)
    assert instance.handle(ForgetCache(7), Instant(1.0)) == [OrderAnswer(7, "done")]
    assert counted.operations == 0
    assert (len(instance.board.cache), instance.board.cache.evicted) == (held, 300 - held)


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
