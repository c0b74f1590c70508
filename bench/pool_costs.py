"""What grows with the pool: operations that an engine does between two steps, with a full cache of many blocks.

    python bench/pool_costs.py [--blocks 400000] [--repeats 3]

The device cache and the host tier each hold that many blocks, in chains of 8. Every figure is the median of the repeats, in
milliseconds of processor time per call.

    clear              forget the whole device cache: a worker was lost, or has other weights
    idle check         the engine proves its books while nothing runs
    coldest 64         the blocks that write=back copies next
    oldest unstored    the 32 host blocks that are put on storage next, behind all that are stored
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import process_time

from baton.config import InstanceConfig, KVConfig, TierConfig
from baton.core.instance import Instance
from baton.core.kv.prefix_cache import NO_PARENT
from baton.protocol.ids import BlockKey

CHAIN = 8


def full_instance(blocks: int) -> Instance:
    instance = Instance(InstanceConfig(kv=KVConfig(blocks=blocks), tiers=TierConfig(host_blocks=blocks, storage=True)))
    cache, host = instance.board.cache, instance.board.tiers.host
    for begin in range(0, blocks, CHAIN):
        keys = [BlockKey((begin + place).to_bytes(32, "big")) for place in range(min(CHAIN, blocks - begin))]
        table, parent = cache.take(len(keys)), NO_PARENT
        for key, block in zip(keys, table, strict=True):
            cache.insert(key, parent, block)
            parent = block
        cache.release(table)
        last = begin + CHAIN >= blocks
        for key, block in zip(keys, host.take(len(keys)), strict=True):
            host.insert(key, block, stored=not last)
    return instance


def seconds(work: Callable[[], object]) -> float:
    begin = process_time()
    work()
    return process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=400_000, help="cached blocks of each tier (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats (default %(default)s)")
    arguments = parser.parse_args()
    taken: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        instance = full_instance(arguments.blocks)
        cache, host = instance.board.cache, instance.board.tiers.host
        check = getattr(instance, "check_part", instance.check)  # before there was one, all was checked
        for name, work in {
            "idle check": check,
            "coldest 64": lambda cache=cache: cache.coldest(64),
            "oldest unstored": lambda host=host: host.oldest_unstored(32),
            "clear": cache.clear,
        }.items():
            taken.setdefault(name, []).append(seconds(work))
    print(f"milliseconds of processor time with {arguments.blocks:,} blocks")
    for name, values in taken.items():
        print(f"{name:<20}{1e3 * median(values):>10.2f}")


if __name__ == "__main__":
    main()
