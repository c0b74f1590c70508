"""CPUs: main memory, a pool in anonymous shared memory, a forward pass in C or, without a compiler, in torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

from baton.cgroup import KERNEL, Kernel, processor_quota
from baton.config import WorkerConfig
from baton.config.device_defaults import CPU, StepDefaults
from baton.errors import EngineError, InvalidConfig, ModelUnsupported
from baton.kvpool.layout import KVKind, KVLayout
from baton.kvpool.memory import MemoryFacts, main_memory, transient_bytes
from baton.kvpool.pool import KVPool
from baton.models.config import ModelConfig
from baton.models.loaders.weights import Progress, RawWeights
from baton.models.open import OpenedEncoder, OpenedModel
from baton.native.build import NoCompiler
from baton.native.exchange import RankExchange
from baton.native.library import Library, load_best
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PoolReady
from baton.worker.collective.base import Collective
from baton.worker.executors.base import LoadedExecutor
from baton.worker.executors.stepwise import stepwise
from baton.worker.forward.base import torch_kv_kind
from baton.worker.forward.native_forward import kv_kind_for, load_native
from baton.worker.platforms.lacks import native_lacks

if TYPE_CHECKING:
    from baton.models.encoders.torch_encoder import Encoder

log = logging.getLogger(__name__)


class CpuPlatform:
    name = "cpu"
    shares_pools = True

    def step_defaults(self, sharers: int) -> StepDefaults:
        return CPU

    @cached_property
    def _library(self) -> Library | NoCompiler:
        """The C library, or why there is none."""
        try:
            return load_best()
        except NoCompiler as error:
            return error

    def _native(self, model: ModelConfig) -> Library | EngineError:
        """The C library for this model, or why there is none."""
        lacks = native_lacks(model)
        if lacks:
            return ModelUnsupported(f"our kernels for CPUs do not compute {', '.join(lacks)}: take --compute torch, or a GPU")
        return self._library

    def kv_kind(self, model: ModelConfig, settings: WorkerConfig) -> KVKind:
        native = self._native(model)
        if settings.compute != "torch" and isinstance(native, Library):
            return kv_kind_for(native, model, settings)
        return torch_kv_kind(settings)

    def load(self, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None = None) -> LoadedExecutor:
        return self._loaded(opened, settings, progress, None)

    def load_part(
        self, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None, collective: Collective
    ) -> LoadedExecutor:
        return self._loaded(opened, settings, progress, collective)

    def _loaded(
        self, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None, collective: Collective | None
    ) -> LoadedExecutor:
        """Loads the model in C if the kernels support it, else in torch. Raises if the chosen or the only way is not
        possible."""
        settings = replace(settings, threads=settings.threads or max(1, usable_cores() // settings.ranks))
        exchange = collective if isinstance(collective, RankExchange) else None
        why = ""
        if settings.compute != "torch":
            native = self._native(opened.config)
            if isinstance(native, Library):
                return stepwise(load_native(native, opened, settings, progress, exchange))
            if settings.compute == "native":
                raise native
            why = str(native)
        try:
            # importing takes a second and 200 MiB, so only if needed
            from baton.worker.forward.torch_forward import load_torch, of_tensors
        except ModuleNotFoundError as error:
            if settings.compute == "torch":
                raise InvalidConfig("--compute torch: torch is not installed: pip install torch") from error
            raise InvalidConfig(
                f"{why}; and torch, which could compute instead, is not installed: install a C compiler (gcc or clang), "
                "or pip install torch"
            ) from error
        if why:
            log.warning("the model runs in torch, which is several times slower: %s", why)
        return stepwise(load_torch(opened, settings, progress, of_tensors(collective)))

    def encoder(self, opened: OpenedEncoder, raw: RawWeights, settings: WorkerConfig) -> Encoder:
        from baton.worker.executors.torch_encoder import encoder_on_host

        return encoder_on_host(opened.config, raw, settings.threads or usable_cores())

    def memory(self) -> MemoryFacts:
        return main_memory()

    def memory_of_step(self, run: Callable[[], object]) -> int:
        return transient_bytes(run)

    def create_pool(self, layout: KVLayout, blocks: int, incarnation: PoolIncarnation | None = None) -> KVPool:
        return KVPool.create(layout, blocks, incarnation=incarnation)

    def attach_pool(self, fd: int, announced: PoolReady) -> KVPool:
        return KVPool.attach(fd, announced)


def usable_cores(kernel: Kernel = KERNEL) -> int:
    """Cores that this process may use, or fewer if a container's CPU quota is lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = processor_quota(kernel)
    return cores if quota is None else max(1, min(cores, ceil(quota)))
