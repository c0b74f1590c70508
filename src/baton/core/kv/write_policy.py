"""Chooses blocks to copy down, and when (TierConfig.write).

    through     each block when it is computed
    selective   a block that was hit `write_hits` times
    back        when the device runs out of blocks, the ones that would be evicted next

Besides, the published blocks of a preempted sequence (TierConfig.preempted). The choice of an event is sent at its end
(tiers.py); no request waits for it, and a block that is reassigned before is not copied. Called only while the service is
connected.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.config import TierConfig
from baton.core.kv.host_tier import HostTier
from baton.core.kv.move import Move
from baton.core.kv.prefix_cache import PrefixCache
from baton.protocol.ids import BlockId, BlockKey, Generation


class WritePolicy:
    __slots__ = ("_cache", "_cleaned", "_config", "_host", "_storing", "to_put", "to_store")

    def __init__(self, config: TierConfig, cache: PrefixCache, host: HostTier) -> None:
        self._config = config
        self._cache = cache
        self._host = host
        self.to_store: dict[BlockKey, tuple[BlockId, Generation, bool]] = {}
        "Blocks chosen in this event: block, its generation at that time, and whether storage gets it at once."
        self.to_put: dict[BlockKey, None] = {}
        "Keys on the host that storage should get."
        self._storing: dict[BlockKey, tuple[Move, int]] = {}
        "Stores in progress: the move, and the key's place in it."
        self._cleaned = -1

    def published(self, key: BlockKey, block: BlockId, *, prompt: bool) -> None:
        """Record that a computed block was cached under this key."""
        if self._config.write == "through" and (prompt or self._config.write_outputs) and key not in self._host:
            self._want(key, block, self._config.storage)

    def adopted(self, key: BlockKey, block: BlockId) -> None:
        """Record that a block computed by another instance was cached. That instance puts it on storage, if any does."""
        if self._config.write == "through" and key not in self._host:
            self._want(key, block, False)

    def found(self, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> None:
        """Record that blocks of the device were hit."""
        if self._config.write == "selective":
            for key, block in zip(keys, blocks, strict=True):
                if key not in self._host and self._cache.hits_of(block) >= self._config.write_hits:
                    self._want(key, block, self._config.storage)

    def park(self, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> None:
        """Copy the published blocks of a preempted sequence before they are evicted."""
        if self._config.preempted != "drop":
            self._host.touch(keys)
            for key, block in zip(keys, blocks, strict=True):
                if key not in self._host:
                    self._want(key, block, self._config.preempted == "storage")
                elif self._config.preempted == "storage" and not self._host.is_stored(key):
                    self.to_put[key] = None

    def clean_ahead(self, *, putting: bool) -> None:
        """Write back: copy the blocks that will be evicted next. Called while no store is under way."""
        config, cache, host, pool = self._config, self._cache, self._host, self._cache.pool
        if cache.changes == self._cleaned or pool.free >= config.watermark * pool.total:
            return
        self._cleaned = cache.changes  # once per change: a host tier that is too small must not be churned
        for key, block in cache.coldest(min(config.write_back_blocks, host.total)):
            if key not in host:
                self._want(key, block, False)
        if config.storage and not putting and host.free < config.watermark * host.total:
            self.to_put.update(dict.fromkeys(host.oldest_unstored(config.put_blocks)))

    def store_begun(self, move: Move) -> None:
        for place, key in enumerate(move.keys):
            self._storing[key] = (move, place)

    def store_ended(self, move: Move) -> None:
        for key in move.keys:
            if key in self._storing and self._storing[key][0] is move:
                del self._storing[key]

    def clear(self) -> None:
        self.to_store.clear()
        self.to_put.clear()

    def _want(self, key: BlockKey, block: BlockId, on_to_storage: bool) -> None:
        if not self._host.total:
            return  # the service is used for hand-offs only
        generation = self._cache.pool.generation(block)
        move, place = self._storing.get(key, (None, 0))
        if move is not None and not move.void and (move.device[place], move.generations[place]) == (block, generation):
            move.on_to_storage[place] |= on_to_storage  # this content is being stored already
            return
        self.to_store[key] = (block, generation, on_to_storage)
