"""What the worker asks of hardware. One model runner serves every platform; it never asks what it runs on.

A start goes: step_defaults(), where sizes of steps are not given -> kv_kind() -> load() -> memory_of_step() and memory(), where
the number of blocks is not given -> create_pool(), or attach_pool() where another process made it.

A platform of another package comes by entry point (plug_ins.py); baton.testing.PlatformConformance says whether it computes
what it must.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from baton.config import WorkerConfig
from baton.config.device_defaults import StepDefaults
from baton.kvpool.base import Pool
from baton.kvpool.layout import KVKind, KVLayout
from baton.kvpool.memory import MemoryFacts
from baton.models.config import ModelConfig
from baton.models.loaders.weights import Progress
from baton.models.open import OpenedModel
from baton.protocol.pool import PoolReady
from baton.worker.executors.base import LoadedExecutor


class Platform(Protocol):
    name: str
    shares_pools: bool
    """Whether the cache service can attach what create_pool() makes and attach_pool() takes: a KVPool, or memory of the CUDA
    driver (kvpool/open.py). Without it an instance has no lower tiers and no part in hand-offs."""

    def step_defaults(self, sharers: int) -> StepDefaults:
        """Sizes of steps that are not given. `sharers`: instances on this device, which divide its memory."""
        ...

    def kv_kind(self, model: ModelConfig, settings: WorkerConfig) -> KVKind:
        """What the pool will hold. Asked before load(): a pool that is too small should be said before weights are read."""
        ...

    def load(self, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None) -> LoadedExecutor:
        """Reads the weights, and chooses what computes on them."""
        ...

    def memory(self) -> MemoryFacts: ...

    def memory_of_step(self, run: Callable[[], object]) -> int:
        """Runs it, and says how many bytes it needed while it ran, besides what is still there afterwards."""
        ...

    def create_pool(self, layout: KVLayout, blocks: int) -> Pool: ...

    def attach_pool(self, fd: int, announced: PoolReady) -> Pool:
        """A pool that another process made and announced. Its descriptor was passed to us and is ours."""
        ...


PlatformOpener = Callable[[WorkerConfig, Path], tuple[Platform, WorkerConfig]]
"""What an entry point of `baton.platforms` names: the platform for these settings and the model at this path, and the settings
without "auto" (dtype, quantization). It raises InvalidConfig for what can never work, before any weights are read."""
