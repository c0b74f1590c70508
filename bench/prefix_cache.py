"""Cost of the prefix cache, per operation, with 1,000, 100,000 and 1,000,000 cached blocks. The goal: the same cost.

    python bench/prefix_cache.py [--sizes 1000,100000,1000000] [--repeats N] [--json]

The cache holds chains of 64 blocks (prompts of 1,024 tokens at 16 a block) that nobody uses. Keys are synthetic 32-byte
digests: hashing is not measured here. Every figure is the median over the repeats, each of which works on chains chosen
anew at random, so that a large cache is paid for in full (its memory does not fit the processor's caches).

    match 64 hit     longest match of 64 keys that are all cached          a call
    match 32 of 64   ... of which the first half is cached                 a call
    hit and release  hold a matched chain, let it go again                 a block
    take             hand out free blocks                                  a block
    insert           publish a computed block under its parent             a block
    release          let published blocks go: idle, offered for eviction   a block
    evict            drop the next block in LRU order                      a block
    take, evicting   hand out blocks when none is free, and let them go    a block
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import count
from random import Random
from statistics import median
from time import perf_counter

from baton.core.kv.block_pool import BlockPool
from baton.core.kv.eviction import lru
from baton.core.kv.prefix_cache import NO_PARENT, PrefixCache
from baton.protocol.ids import BlockId, BlockKey

CHAIN = 64
CHAINS_A_REPEAT = 16


class Rig:
    """A full cache, and a few chains' worth of free blocks to work with."""

    def __init__(self, size: int) -> None:
        self.cache = PrefixCache(BlockPool(size + CHAIN * CHAINS_A_REPEAT), lru)
        self.chains: list[list[BlockKey]] = []
        "Keys of what is cached whole."
        self._numbers = count()
        self._random = Random(size)
        while len(self.cache) < size:
            keys = self.new_keys(min(CHAIN, size - len(self.cache)))
            blocks = self.cache.take(len(keys))
            self.insert(keys, blocks)
            self.cache.release(blocks)
            self.chains.append(keys)

    def new_keys(self, length: int = CHAIN) -> list[BlockKey]:
        begin = next(self._numbers) * CHAIN
        return [BlockKey((begin + place).to_bytes(32, "big")) for place in range(length)]

    def insert(self, keys: list[BlockKey], blocks: list[BlockId]) -> None:
        cache, parent = self.cache, NO_PARENT
        for key, block in zip(keys, blocks, strict=True):
            cache.insert(key, parent, block)
            parent = block

    def some_chains(self) -> list[list[BlockKey]]:
        return self._random.choices([keys for keys in self.chains if len(keys) == CHAIN], k=CHAINS_A_REPEAT)

    def remember(self, fresh: list[list[BlockKey]]) -> None:
        """These chains came; forget those that were evicted for them."""
        cached = self.cache.match
        self.chains = [keys for keys in [*self.chains, *fresh] if cached(keys, len(keys)) == len(keys)]


def match_all(cache: PrefixCache, chains: list[list[BlockKey]]) -> None:
    for keys in chains:
        cache.match(keys, CHAIN)


def hit_all(cache: PrefixCache, chains: list[list[BlockKey]]) -> None:
    for keys in chains:
        cache.release(cache.acquire(keys))


def take_all(cache: PrefixCache, tables: list[list[BlockId]]) -> None:
    for _ in range(CHAINS_A_REPEAT):
        tables.append(cache.take(CHAIN))


def insert_all(rig: Rig, chains: list[list[BlockKey]], tables: list[list[BlockId]]) -> None:
    for keys, blocks in zip(chains, tables, strict=True):
        rig.insert(keys, blocks)


def release_all(cache: PrefixCache, tables: list[list[BlockId]]) -> None:
    for blocks in tables:
        cache.release(blocks)


def measure(size: int, repeats: int) -> dict[str, float]:
    """Microseconds by operation."""
    rig = Rig(size)
    cache = rig.cache
    times: dict[str, list[float]] = {}

    def note(operation: str, operations: int, work: Callable[..., object], *arguments: object) -> None:
        begin = perf_counter()
        work(*arguments)
        times.setdefault(operation, []).append((perf_counter() - begin) / operations * 1e6)

    for _ in range(repeats):
        half_known = [[*keys[: CHAIN // 2], *rig.new_keys(CHAIN // 2)] for keys in rig.some_chains()]
        note("match 64 hit", CHAINS_A_REPEAT, match_all, cache, rig.some_chains())
        note("match 32 of 64", CHAINS_A_REPEAT, match_all, cache, half_known)
        note("hit and release", CHAINS_A_REPEAT * CHAIN, hit_all, cache, rig.some_chains())

        # Fresh blocks go round: out of the free list, into the cache, and as many of the oldest out of the cache.
        fresh = [rig.new_keys() for _ in range(CHAINS_A_REPEAT)]
        tables: list[list[BlockId]] = []
        note("take", CHAINS_A_REPEAT * CHAIN, take_all, cache, tables)
        note("insert", CHAINS_A_REPEAT * CHAIN, insert_all, rig, fresh, tables)
        note("release", CHAINS_A_REPEAT * CHAIN, release_all, cache, tables)
        assert cache.pool.free == 0
        note("take, evicting", CHAIN, lambda: cache.release(cache.take(CHAIN)))
        note("evict", (CHAINS_A_REPEAT - 1) * CHAIN, cache.evict, (CHAINS_A_REPEAT - 1) * CHAIN)
        rig.remember(fresh)
        assert len(cache) == size
    return {operation: median(values) for operation, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,100000,1000000", help="cached blocks, with commas (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=25, help="repeats for each size (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    lines = [{"cached_blocks": size} | measure(size, arguments.repeats) for size in sizes]
    if arguments.json:
        print(json.dumps(lines))
        return
    print(f"{'us per operation, cached blocks:':<32}" + "".join(f"{size:>12,}" for size in sizes) + f"{'last/first':>12}")
    for operation in lines[0]:
        if operation != "cached_blocks":
            values = [line[operation] for line in lines]
            print(f"{operation:<32}" + "".join(f"{value:>12.2f}" for value in values) + f"{values[-1] / values[0]:>12.1f}")


if __name__ == "__main__":
    main()
