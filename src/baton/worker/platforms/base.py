"""What the worker asks of hardware. One model runner serves every platform; it never asks what it runs on.

A start goes: kv_dtype() -> load() -> memory() -> blocks_that_fit() -> create_pool(), or attach_pool() where another process
made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.config import WorkerConfig
from baton.kvpool.layout import KVDtype, KVLayout
from baton.kvpool.memory import MemoryFacts
from baton.kvpool.pool import KVPool
from baton.models.config import ModelConfig
from baton.models.loaders.weights import Progress
from baton.models.open import OpenedModel
from baton.protocol.pool import PoolReady
from baton.worker.forward.base import LoadedForward


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBounds:
    """The largest step that will ever run: what has to fit beside the pool."""

    slots: int
    tokens: int


class Platform(Protocol):
    name: str

    def kv_dtype(self, model: ModelConfig, settings: WorkerConfig) -> KVDtype:
        """What the pool will hold. Asked before load(): a pool that is too small should be said before weights are read."""
        ...

    def load(self, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None) -> LoadedForward:
        """Reads the weights, and chooses what computes on them."""
        ...

    def memory(self) -> MemoryFacts: ...

    def blocks_that_fit(self, config: ModelConfig, layout: KVLayout, bounds: StepBounds, memory_share: float) -> int:
        """How many blocks the pool can have, the model being loaded, if the engine may use `memory_share` of what is free.

        A platform whose step needs memory that nobody can work out runs the largest step on a throw-away pool first.
        At least 1; raises InvalidConfig with the numbers where not even one fits.
        """
        ...

    def create_pool(self, layout: KVLayout, blocks: int) -> KVPool: ...

    def attach_pool(self, fd: int, announced: PoolReady) -> KVPool:
        """A pool that another process made and announced. Its descriptor was passed to us and is ours."""
        ...
