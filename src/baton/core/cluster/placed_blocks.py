"""Blocks of placed requests by priority: what an urgent request may get by preemption.

Counted when a request is placed: its prompt and the tokens that its client has. A shared prefix counts for each request, later
tokens do not count. This is an estimate for the router's choice; the instance alone decides what it preempts.
"""

from __future__ import annotations


class PlacedBlocks:
    __slots__ = ("_by_priority",)

    def __init__(self) -> None:
        self._by_priority: dict[int, int] = {}

    def add(self, priority: int, blocks: int) -> None:
        self._by_priority[priority] = self._by_priority.get(priority, 0) + blocks

    def remove(self, priority: int, blocks: int) -> None:
        left = self._by_priority[priority] - blocks
        if left:
            self._by_priority[priority] = left
        else:
            del self._by_priority[priority]

    @property
    def total(self) -> int:
        return sum(self._by_priority.values())

    def less_urgent(self, priority: int) -> int:
        """Blocks of requests that are strictly less urgent."""
        return sum([blocks for other, blocks in self._by_priority.items() if other > priority])
