"""The interface of hardware to the worker.

One model runner serves every platform, without knowing it. Calls at start: step_defaults(), if step sizes are not given ->
kv_kind() -> load() -> memory_of_step() and memory(), if the number of blocks is not given -> create_pool(), or attach_pool() if
another process created it.

A platform of another package comes by entry point (plug_ins.py); baton.testing.PlatformConformance checks its results.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from baton.config import WorkerConfig
from baton.config.device_defaults import StepDefaults
from baton.kvpool.base import Pool
from baton.kvpool.layout import KVKind, KVLayout
from baton.kvpool.memory import MemoryFacts
from baton.models.config import ModelConfig
from baton.models.loaders.weights import Progress, RawWeights
from baton.models.open import OpenedEncoder, OpenedModel
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PoolReady
from baton.worker.collective.base import Collective
from baton.worker.executors.base import LoadedExecutor

if TYPE_CHECKING:
    from baton.models.encoders.torch_encoder import Encoder


class Platform(Protocol):
    name: str
    shares_pools: bool
    """Whether the cache service can attach to the pools of create_pool() and attach_pool(): a KVPool, or memory of the CUDA
    driver (kvpool/open.py). Otherwise an instance has no lower tiers and no hand-offs."""

    def step_defaults(self, sharers: int) -> StepDefaults:
        """Default step sizes. `sharers`: instances on this device, which divide its memory."""
        ...

    def kv_kind(self, model: ModelConfig, settings: WorkerConfig) -> KVKind:
        """The KV type of the pool. Called before load(), so that a pool that is too small is reported before weights are
        read."""
        ...

    def load(self, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None) -> LoadedExecutor:
        """Reads the weights, and chooses the executor."""
        ...

    def memory(self) -> MemoryFacts: ...

    def memory_of_step(self, run: Callable[[], object]) -> int:
        """Runs the callable, and returns the bytes that it needed temporarily."""
        ...

    def create_pool(self, layout: KVLayout, blocks: int, incarnation: PoolIncarnation | None = None) -> Pool:
        """Creates a pool. `incarnation`: given to the ranks of a worker set, whose pools belong together. None: a random
        one."""
        ...

    def attach_pool(self, fd: int, announced: PoolReady) -> Pool:
        """Attaches to a pool that another process created and announced. The descriptor now belongs to this process."""
        ...


@runtime_checkable
class RankedPlatform(Protocol):
    """A platform that can compute a model as one of several ranks."""

    def load_part(
        self, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None, collective: Collective
    ) -> LoadedExecutor:
        """Loads one rank's part as Platform.load() does (models/loaders/sharded.py). The executor's steps are collective."""
        ...


@runtime_checkable
class EncoderPlatform(Protocol):
    """A platform that can compute encoders."""

    def encoder(self, opened: OpenedEncoder, raw: RawWeights, settings: WorkerConfig) -> Encoder:
        """Reads the weights. torch, in which encoders run, is installed."""
        ...


PlatformOpener = Callable[[WorkerConfig, Path], tuple[Platform, WorkerConfig]]
"""The type of an entry point of `baton.platforms`: returns the platform for these settings and the model at this path, and the
settings without "auto" (dtype, quantization). Raises InvalidConfig for impossible settings, before any weights are read."""
