"""The order of eviction of idle cached blocks: a policy is a sort key, the smallest goes first.

A key may depend only on the two numbers given, both of which change only while a block is in use. The cache relies on it: a
block that stays idle keeps its place in the heap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SortKey = tuple[int, ...]
EvictionPolicy = Callable[[int, int], SortKey]
"""Policy: (tick of the last release, number of hits) -> sort key."""


def lru(last_used: int, hits: int) -> SortKey:
    """Evict the least recently released block first."""
    return (last_used,)


def lfu(last_used: int, hits: int) -> SortKey:
    """Evict the least often hit block first; among equals the least recently released."""
    return (hits, last_used)


POLICIES: Final[dict[str, EvictionPolicy]] = {"lru": lru, "lfu": lfu}
