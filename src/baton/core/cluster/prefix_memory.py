"""What an instance probably has cached: keys of the blocks that it was sent, the least recently sent forgotten first.

A guess. The instance evicts when it wants to, and other routers send to it too. A wrong guess costs time, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.protocol.ids import BlockKey


class PrefixMemory:
    __slots__ = ("_keys", "blocks_max")

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._keys: dict[BlockKey, None] = {}
        "The least recently used first."

    def __len__(self) -> int:
        return len(self._keys)

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first blocks are remembered without a gap."""
        known = self._keys
        for count, key in enumerate(keys):
            if key not in known:
                return count
        return len(keys)

    def add(self, keys: Sequence[BlockKey]) -> None:
        """The first block last: a chain is of use only from its beginning, so its end is forgotten first."""
        known = self._keys
        for key in reversed(keys):
            known.pop(key, None)
            known[key] = None
        while len(known) > self.blocks_max:
            del known[next(iter(known))]
