"""A driver with lower tiers: what the instance tells the cache service is kept until a test lets it happen."""

from __future__ import annotations

from typing import Any

from baton.core.effects import RestartCache, SendToCache
from baton.core.events import BlocksMoved, CacheLost, CacheReady, EvictSome, StorageAnswered
from baton.protocol.moves import BlockMove, MoveResult, StorageAnswer, StorageQuery

from .harness import Driver

Marks = list[int | None]
SCRIBBLED = 7_777
"""No position of any prompt has this mark at this place, but by chance."""


class TieredDriver(Driver):
    def __init__(self, *, host_blocks: int = 64, **settings: Any) -> None:
        self.told: list[BlockMove | StorageQuery] = []
        "Not carried out yet."
        self.host: dict[int, Marks] = {}
        self.storage: dict[bytes, Marks] = {}
        self.cache_restarts = 0
        super().__init__(host_blocks=host_blocks, **settings)
        self.dispatch(CacheReady())

    def on_cache_effect(self, effect: object) -> None:
        if isinstance(effect, SendToCache):
            self.told.append(effect.message)
        else:
            assert isinstance(effect, RestartCache)
            self.cache_restarts += 1

    @property
    def kinds(self) -> list[str]:
        return [message.kind if isinstance(message, BlockMove) else "query" for message in self.told]

    def carry_out(self, kind: str = "", *, moved: int | None = None, error: str | None = None) -> None:
        """The oldest message, or the oldest of this kind: copied now, answered now."""
        message = self.told.pop(self.kinds.index(kind) if kind else 0)
        if isinstance(message, StorageQuery):
            found = 0
            while found < len(message.keys) and message.keys[found] in self.storage:
                found += 1
            self.dispatch(StorageAnswered(StorageAnswer(message.id, found if error is None else 0, error)))
            return
        count = len(message.host) if moved is None else moved
        self.dispatch(BlocksMoved(MoveResult(message.id, self.copy(message, count), 0.001, error)))

    def copy(self, move: BlockMove, count: int) -> int:
        size, memory = self.config.kv.block_size, self.worker.memory
        for place in range(count):
            host = move.host[place]
            if move.kind == "store":
                self.host[host] = [memory.get((move.device[place], offset)) for offset in range(size)]
            elif move.kind == "load":
                for offset, mark in enumerate(self.host[host]):
                    assert mark is not None
                    memory[move.device[place], offset] = mark
            elif move.kind == "put":
                self.storage[move.keys[place]] = list(self.host[host])
            elif move.keys[place] in self.storage:
                self.host[host] = list(self.storage[move.keys[place]])
            else:
                return place
        return count

    def settle(self) -> None:
        """Everything that is told is carried out, and what follows from it, until nothing is left to do."""
        for _ in range(10_000):
            if self.told:
                self.carry_out()
            elif self.plans or self.results:
                self.step()
            else:
                return
        raise AssertionError("never quiet")

    def forget_device(self) -> None:
        """Nothing is cached on the device, and its free blocks hold something else: what is not brought back is wrong."""
        self.dispatch(EvictSome(10_000))
        if not self.plans:  # else a plan in flight may still read them
            for block in self.pool._free:
                for offset in range(self.config.kv.block_size):
                    self.worker.memory[block, offset] = SCRIBBLED

    def start_cache(self) -> None:
        self.dispatch(CacheReady())

    def lose_cache(self, *, kept: bool = True) -> None:
        self.told.clear()
        self.dispatch(CacheLost())
        if not kept:
            self.host.clear()

    @property
    def tiers(self) -> Any:
        return self.instance.board.tiers
