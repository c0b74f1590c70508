"""The prefix cache against a naive one: a dict of paths, no bisection, no heap, everything counted anew every time."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.kv.block_pool import BlockPool
from baton.core.kv.eviction import POLICIES
from baton.core.kv.prefix_cache import NO_PARENT, PrefixCache
from baton.errors import InvariantBroken

Path = tuple[int, ...]


def keys_of(path: Path) -> list[bytes]:
    return [bytes(path[: length + 1]) for length in range(len(path))]


@dataclass
class Table:
    """What one request holds: the block of every place of its path; the leading `published` ones were offered."""

    path: Path
    blocks: list[int]
    published: int


@dataclass
class NaiveCache:
    total: int
    policy: str
    cached: dict[Path, int] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    pins: list[list[int]] = field(default_factory=list)
    used: dict[int, int] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)
    releases: int = 0

    def held(self) -> list[int]:
        return [block for table in self.tables for block in table.blocks] + [block for pin in self.pins for block in pin]

    def idle(self) -> list[Path]:
        held = self.held()
        return [path for path, block in self.cached.items() if block not in held]

    def free(self) -> int:
        return self.total - len({*self.held(), *self.cached.values()})

    def match(self, path: Path) -> int:
        return next((n for n in range(len(path)) if path[: n + 1] not in self.cached), len(path))

    def eviction_order(self) -> list[int]:
        leaves = [path for path in self.idle() if not any(other[:-1] == path for other in self.cached)]
        age = {"lru": lambda b: (self.used[b], b), "lfu": lambda b: (self.hits[b], self.used[b], b)}[self.policy]
        return sorted((self.cached[path] for path in leaves), key=age)

    def evict(self, count: int) -> int:
        gone = 0
        while gone < count and (order := self.eviction_order()):
            self.cached = {path: block for path, block in self.cached.items() if block != order[0]}
            gone += 1
        return gone

    def let_go(self, before: list[Path]) -> None:
        """Blocks that were not idle `before` and are now carry the number of this release."""
        self.releases += 1
        for path in self.idle():
            if path not in before:
                self.used[self.cached[path]] = self.releases


some = st.integers(0, 1000)
paths = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


class CacheAgainstModel(RuleBasedStateMachine):
    @initialize(total=st.integers(4, 14), policy=st.sampled_from(sorted(POLICIES)))
    def start(self, total, policy):
        self.cache = PrefixCache(BlockPool(total), POLICIES[policy])
        self.model = NaiveCache(total, policy)
        self.evicted = 0

    @rule(path=paths, computed=st.integers(0, 6))
    def admit(self, path, computed):
        """As the scheduler does: ask, then hold the hits, then take the rest. Some of it is computed at once."""
        cache, model, keys = self.cache, self.model, keys_of(path)
        hit = model.match(path)
        assert cache.match(keys, len(keys)) == hit
        idle_hits = sum(path[: n + 1] in model.idle() for n in range(hit))
        assert cache.idle_among(keys, hit) == idle_hits
        new = len(path) - hit
        if new + idle_hits > cache.available:
            return
        blocks = cache.acquire(keys[:hit])
        assert blocks == [model.cached[path[: n + 1]] for n in range(hit)]
        for block in blocks:
            model.hits[block] += 1
        table = Table(path, blocks, hit)
        model.tables.append(table)
        self.evicted += model.evict(new - model.free())
        table.blocks += cache.take(new)
        assert len({*table.blocks}) == len(path)
        for _ in range(table.published, min(computed, len(path))):
            self.publish_next(table)

    @precondition(lambda self: any(t.published < len(t.path) for t in self.model.tables))
    @rule(number=some)
    def publish(self, number):
        unfinished = [table for table in self.model.tables if table.published < len(table.path)]
        self.publish_next(unfinished[number % len(unfinished)])

    def publish_next(self, table):
        """Its next block is computed. Who comes second is folded onto the first."""
        cache, model, place = self.cache, self.model, table.published
        path, own, parent = table.path[: place + 1], table.blocks[place], table.blocks[place - 1] if place else NO_PARENT
        if path not in model.cached and any(own in pin for pin in model.pins):
            with pytest.raises(InvariantBroken):  # a move holds it: what is in it is not known to be whole
                cache.insert(bytes(path), parent, own)
            return
        first = cache.insert(bytes(path), parent, own)
        assert first == model.cached.get(path, own), "never replaced under its key"
        table.published += 1
        if first == own:
            model.cached[path], model.hits[own] = own, 0
        else:
            cache.acquire([bytes(path)])
            model.hits[first] += 1
            table.blocks[place] = first
            cache.release((own,))
            model.releases += 1

    @precondition(lambda self: self.model.tables)
    @rule(number=some)
    def release(self, number):
        before = self.model.idle()
        table = self.model.tables.pop(number % len(self.model.tables))
        self.cache.release(table.blocks)
        self.model.let_go(before)

    @precondition(lambda self: self.model.tables)
    @rule(number=some, count=st.integers(1, 6))
    def pin(self, number, count):
        """A move holds a leading run of somebody's table."""
        blocks = self.model.tables[number % len(self.model.tables)].blocks[:count]
        self.cache.pin(blocks)
        self.model.pins.append(list(blocks))

    @precondition(lambda self: self.model.pins)
    @rule(number=some)
    def unpin(self, number):
        before = self.model.idle()
        blocks = self.model.pins.pop(number % len(self.model.pins))
        self.cache.unpin(blocks)
        self.model.let_go(before)

    @rule(count=st.integers(0, 6))
    def evict(self, count):
        gone = self.model.evict(count)
        assert self.cache.evict(count) == gone
        self.evicted += gone

    @rule(over=st.integers(1, 3), how=st.sampled_from(["take too many", "clear", *["neither"] * 8]))
    def lose_all_that_is_idle(self, over, how):
        """Rarely: it empties the cache."""
        cache, model = self.cache, self.model
        if how == "take too many":  # all or nothing: nobody gets a block, nothing is evicted
            available = cache.available
            with pytest.raises(InvariantBroken):
                cache.take(available + over)
            assert cache.available == available
        if how == "clear" and len(model.idle()) == len(model.cached):
            cache.clear()
            self.evicted += model.evict(model.total)
        elif how == "clear":
            with pytest.raises(InvariantBroken):
                cache.clear()

    @invariant()
    def agree(self):
        if not hasattr(self, "cache"):
            return
        cache, model = self.cache, self.model
        cache.check()
        cache.pool.check()
        assert {block: cache.key_of(block) for block in range(model.total) if cache.key_of(block) is not None} == {
            block: bytes(path) for path, block in model.cached.items()
        }
        assert len(cache) == len(model.cached)
        assert cache.available == model.free() + len(model.idle())
        assert cache.eviction_order() == model.eviction_order()
        assert cache.evicted == self.evicted

    @invariant()
    def closed_and_covered(self):
        """The two facts that carry the design, proved from the model."""
        if not hasattr(self, "model"):
            return
        held = self.model.held()
        for path, block in self.model.cached.items():
            parent = path[:-1]
            assert not parent or parent in self.model.cached
            assert not parent or block not in held or self.model.cached[parent] in held


CacheAgainstModel.TestCase.settings = settings(stateful_step_count=50)
TestCacheAgainstModel = CacheAgainstModel.TestCase


# By hand


def cache_with(*paths: Path, blocks: int = 16, policy: str = "lru") -> PrefixCache:
    """Each path was computed by a request that has ended, in this order."""
    cache = PrefixCache(BlockPool(blocks), POLICIES[policy])
    for path in paths:
        cache.release(compute(cache, path))
    return cache


def compute(cache: PrefixCache, path: Path) -> list[int]:
    keys = keys_of(path)
    hit = cache.match(keys, len(keys))
    blocks = cache.acquire(keys[:hit]) + cache.take(len(keys) - hit)
    for place in range(hit, len(keys)):
        assert cache.insert(keys[place], blocks[place - 1] if place else NO_PARENT, blocks[place]) == blocks[place]
    return blocks


def evicted_paths(cache: PrefixCache, count: int) -> list[Path]:
    gone = []
    for _ in range(count):
        before = {cache.key_of(block) for block in range(cache.pool.total)}
        assert cache.evict(1) == 1
        (key,) = before - {cache.key_of(block) for block in range(cache.pool.total)}
        gone.append(tuple(key))
    return gone


def test_longest_prefix_is_matched_whatever_its_length():
    cache = cache_with((1, 2, 3, 4, 5))
    for length in range(6):
        path = (1, 2, 3, 4, 5)[:length] + (9,) * (7 - length)
        assert cache.match(keys_of(path), 7) == length
        assert cache.match(keys_of(path), 3) == min(length, 3)


def test_matching_looks_at_few_keys():
    """Costs do not depend on how much is cached, and hardly on the length of the prompt."""

    class Counted(list):
        asked = 0

        def __getitem__(self, place):
            self.asked += 1
            return super().__getitem__(place)

    cache = cache_with(tuple(range(200)), blocks=256)
    for known in (0, 1, 100, 199, 200):
        keys = Counted(keys_of((*range(known), *[255] * (200 - known))))
        assert cache.match(keys, 200) == known
        assert keys.asked <= 8


def test_matching_changes_nothing():
    cache = cache_with((1, 2), (1, 3), (4,))
    order = cache.eviction_order()
    cache.match(keys_of((4,)), 1)
    cache.idle_among(keys_of((1, 2)), 2)
    assert cache.eviction_order() == order


def test_lru_takes_the_one_released_longest_ago_leaves_first():
    cache = cache_with((1, 2), (3, 4), (5,))
    cache.release(cache.acquire(keys_of((1,))))  # used again: now its child (1, 2) is older than it
    assert evicted_paths(cache, 5) == [(1, 2), (3, 4), (3,), (5,), (1,)]


def test_lfu_takes_the_one_hit_least_often_then_the_oldest():
    cache = cache_with((1,), (2,), (3,), policy="lfu")
    for path, times in (((1,), 2), ((2,), 1)):
        for _ in range(times):
            cache.release(cache.acquire(keys_of(path)))
    assert evicted_paths(cache, 3) == [(3,), (2,), (1,)]


def test_lfu_counts_from_zero_when_a_block_gets_another_content():
    cache = cache_with((1,), blocks=2, policy="lfu")
    for _ in range(5):
        cache.release(cache.acquire(keys_of((1,))))
    cache.evict(1)
    for path in ((2,), (3,)):
        cache.release(compute(cache, path))
    for path in ((2,), (3,)):
        cache.release(cache.acquire(keys_of(path)))
    cache.release(cache.acquire(keys_of((3,))))
    assert evicted_paths(cache, 2) == [(2,), (3,)]


def test_parent_of_a_held_block_is_never_evicted():
    """Eviction never detaches a live child."""
    cache = cache_with((1, 2, 3), (1, 2, 4), (5,))
    held = cache.acquire(keys_of((1, 2, 3)))
    assert cache.evict(100) == 2  # (1, 2, 4) and (5,)
    assert cache.match(keys_of((1, 2, 3)), 3) == 3
    cache.release(held)
    assert cache.evict(100) == 3


def test_take_evicts_only_what_it_must():
    cache = cache_with((1, 2, 3), (4, 5), blocks=6)
    cache.take(3)
    assert cache.evicted == 2
    assert cache.match(keys_of((4, 5)), 2) == 2
    assert cache.match(keys_of((1, 2, 3)), 3) == 1


def test_insert_never_replaces_and_changes_nothing_for_the_second():
    cache = cache_with((1,))
    (mine,) = cache.take(1)
    first = cache.insert(bytes((1,)), NO_PARENT, mine)
    assert first != mine
    assert cache.key_of(mine) is None
    assert len(cache) == 1
    cache.check()


def test_block_whose_parent_is_not_cached_stays_private():
    cache = cache_with()
    parent, child = cache.take(2)
    assert cache.insert(b"child", parent, child) == child
    assert cache.key_of(child) is None
    assert len(cache) == 0
    cache.release([parent, child])
    assert cache.pool.free == cache.pool.total


def test_insert_of_a_block_that_nobody_holds_raises():
    cache = cache_with()
    with pytest.raises(InvariantBroken):
        cache.insert(b"key", NO_PARENT, 3)


def test_pinned_run_survives_until_it_is_unpinned():
    cache = cache_with((1, 2, 3))
    blocks = cache.acquire(keys_of((1, 2)))
    cache.pin(blocks)
    cache.release(blocks)
    assert cache.evict(100) == 1
    with pytest.raises(InvariantBroken):
        cache.clear()
    cache.unpin(blocks)
    assert cache.evict(100) == 2
    with pytest.raises(InvariantBroken):
        cache.unpin(blocks)


def test_block_that_a_move_holds_is_not_published():
    cache = cache_with()
    blocks = cache.take(1)
    cache.pin(blocks)
    with pytest.raises(InvariantBroken):
        cache.insert(b"key", NO_PARENT, blocks[0])
    cache.unpin(blocks)
    assert cache.insert(b"key", NO_PARENT, blocks[0]) == blocks[0]


def test_double_release_raises():
    cache = cache_with()
    blocks = compute(cache, (1, 2))
    cache.release(blocks)
    with pytest.raises(InvariantBroken):
        cache.release(blocks)


def test_stale_heap_entries_are_dropped_and_the_order_stays_right():
    """A block that is hit over and over leaves an entry each time; their number stays bounded (invariant 49)."""
    paths = [(number,) for number in range(40)]
    cache = cache_with(*paths, blocks=40)
    for turn in range(2000):
        cache.release(cache.acquire(keys_of(paths[turn * 7 % 40])))
        assert len(cache._heap) <= 2 * 40 + 65
    cache.check()
    assert evicted_paths(cache, 40) == [paths[turn * 7 % 40] for turn in range(1960, 2000)]


def test_full_pool_of_idle_blocks_can_be_taken_whole():
    cache = cache_with((1, 2, 3, 4), (1, 2, 5, 6), (7, 8), blocks=8)
    assert cache.available == 8
    assert sorted(cache.take(8)) == list(range(8))
    assert len(cache) == 0
    cache.check()
