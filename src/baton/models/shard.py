"""The part of a model that one of several ranks holds (tensor parallelism).

Heads, MLPs and the output head are divided among ranks, experts are given to ranks as wholes; embedding, norms and routers are
on every rank. After attention and after the MLP the ranks add what they computed, so all of them go on with the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}")

    @property
    def is_whole(self) -> bool:
        return self.ranks == 1

    def share(self, size: int, unit: int = 1) -> range:
        """Part of `size` that this rank has, in whole units. The shares of two ranks differ by one unit at most; the last unit
        may be smaller."""
        units = -(-size // unit)
        first, last = (units * rank // self.ranks * unit for rank in (self.rank, self.rank + 1))
        return range(min(first, size), min(last, size))


WHOLE = Shard()
"""Shard of the only rank."""
