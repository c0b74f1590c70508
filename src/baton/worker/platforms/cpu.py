"""Plain CPUs: main memory, a pool in anonymous shared memory, a forward pass in C or, without a compiler, in torch."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import cached_property

from baton.config import WorkerConfig
from baton.errors import InvalidConfig
from baton.kvpool.layout import KVDtype, KVLayout
from baton.kvpool.memory import GIB, MemoryFacts, main_memory
from baton.kvpool.pool import KVPool
from baton.models.config import ModelConfig
from baton.models.loaders.weights import Progress
from baton.models.open import OpenedModel
from baton.native.build import NoCompiler
from baton.native.library import Library, load_best
from baton.protocol.pool import PoolReady
from baton.worker.forward.base import LoadedForward, torch_kv_dtype
from baton.worker.forward.native_forward import kv_dtype_for, load_native
from baton.worker.platforms.base import StepBounds

log = logging.getLogger(__name__)

FLOAT32_BYTES = 4


class CpuPlatform:
    name = "cpu"

    @cached_property
    def _library(self) -> Library | NoCompiler:
        """Our kernels, or why there are none."""
        try:
            return load_best()
        except NoCompiler as error:
            return error

    def kv_dtype(self, model: ModelConfig, settings: WorkerConfig) -> KVDtype:
        if settings.compute != "torch" and isinstance(self._library, Library):
            return kv_dtype_for(self._library, model, settings)
        return torch_kv_dtype(settings)

    def load(self, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None = None) -> LoadedForward:
        settings = replace(settings, threads=settings.threads or usable_cores())
        why = ""
        if settings.compute != "torch":
            if isinstance(self._library, Library):
                return load_native(self._library, opened, settings, progress)
            if settings.compute == "native":
                raise self._library
            why = str(self._library)
        try:
            from baton.worker.forward.torch_forward import load_torch  # a second and 200 MiB, for those who need it
        except ModuleNotFoundError as error:
            if settings.compute == "torch":
                raise InvalidConfig("--compute torch: torch is not installed: pip install torch") from error
            raise InvalidConfig(
                f"{why}; and torch, which could compute instead, is not installed: install a C compiler (gcc or clang), "
                "or pip install torch"
            ) from error
        if why:
            log.warning("the model runs in torch, which is several times slower: %s", why)
        return load_torch(opened, settings, progress)

    def memory(self) -> MemoryFacts:
        return main_memory()

    def blocks_that_fit(self, config: ModelConfig, layout: KVLayout, bounds: StepBounds, memory_share: float) -> int:
        """Worked out and not measured: here a forward of the largest step takes up to a minute, and what it needs is
        a sum of a few products. More blocks than all slots could fill with whole contexts are never asked for."""
        free = self.memory().free_bytes
        step = step_bytes(config, bounds)
        fit = int(free * memory_share - step) // layout.block_bytes
        useful = bounds.slots * -(-config.context_tokens_max // layout.block_size)
        if fit < 1:
            raise InvalidConfig(
                f"no KV block fits: {free / GIB:.2f} GiB are free, {memory_share:.0%} of that may be used, a step of "
                f"{bounds.tokens} tokens needs {step / GIB:.2f} GiB and one block {layout.block_bytes / GIB:.4f} GiB; "
                "lower tokens_per_step or slots, or raise the share"
            )
        return min(fit, useful)

    def create_pool(self, layout: KVLayout, blocks: int) -> KVPool:
        return KVPool.create(layout, blocks)

    def attach_pool(self, fd: int, announced: PoolReady) -> KVPool:
        return KVPool.attach(fd, announced)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def step_bytes(config: ModelConfig, bounds: StepBounds) -> int:
    """Memory of the largest step besides weights and pool.

    The widest moment of a layer: the residual, its norm, and the MLP's product, its activated half and its output, or
    the attention's counterparts. Logits: as the head gives them, a copy that is adjusted, weights of draws, and slack.
    """
    widest = max(3 * config.intermediate_size, 2 * (config.q_size + 2 * config.kv_size) + config.q_size)
    layer = bounds.tokens * (3 * config.hidden_size + widest) * FLOAT32_BYTES
    logits = 4 * bounds.slots * config.vocab_size * FLOAT32_BYTES
    return layer + logits
