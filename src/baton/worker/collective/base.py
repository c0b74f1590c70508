"""The interface of an exchange among the ranks of a worker set.

All ranks make the same calls in the same order. A wait for another rank has a deadline, and raises EngineError with its number.
Implementations also have sum(rows), in place, and gather(part), [ranks, *shape]: of arrays (native/exchange.py) or of tensors
(models/ranks.py).
"""

from __future__ import annotations

from typing import Protocol


class Collective(Protocol):
    rank: int
    ranks: int

    def notes(self, note: bytes) -> list[bytes]:
        """A note of each rank, in the order of ranks. All notes have the same length. Called outside of steps."""
        ...

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers: the same on every rank."""
        ...

    def start_is_over(self) -> None:
        """Called before the first step: from now on the engine's limit of a step (step_seconds_max) ends a wait, where an
        implementation can change its own."""
        ...

    def close(self) -> None: ...
