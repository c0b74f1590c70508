"""Plain CPUs: main memory, a pool in anonymous shared memory, attention by our C kernel or, without a compiler, by torch."""

from __future__ import annotations

import logging

import torch

from baton.errors import InvalidConfig
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.worker.attention.base import AttentionBackend
from baton.worker.attention.build import NoCompiler
from baton.worker.attention.gathered import GatheredAttention
from baton.worker.attention.native import NativeAttention
from baton.worker.kv_pool import KVLayout, KVPool, PoolHandle
from baton.worker.memory import MemoryFacts, main_memory
from baton.worker.platforms.base import StepBounds

log = logging.getLogger(__name__)

GIB = 2**30


class CpuPlatform:
    name = "cpu"

    def __init__(self, *, native_attention: bool = True) -> None:
        self.device = torch.device("cpu")
        self.sampler_device = torch.device("cpu")
        self._native_attention = native_attention

    def memory(self) -> MemoryFacts:
        return main_memory()

    def blocks_that_fit(self, model: Decoder, layout: KVLayout, bounds: StepBounds, memory_share: float) -> int:
        """Worked out and not measured: here a forward of the largest step takes up to a minute, and what it needs is
        a sum of a few products. More blocks than all slots could fill with whole contexts are never asked for."""
        free = self.memory().free_bytes
        step = step_bytes(model.config, bounds, model.dtype.itemsize)
        fit = int(free * memory_share - step) // layout.block_bytes
        useful = bounds.slots * -(-model.config.context_tokens_max // layout.block_size)
        if fit < 1:
            raise InvalidConfig(
                f"no KV block fits: {free / GIB:.2f} GiB are free, {memory_share:.0%} of that may be used, a step of "
                f"{bounds.tokens} tokens needs {step / GIB:.2f} GiB and one block {layout.block_bytes / GIB:.4f} GiB; "
                "lower tokens_per_step or slots, or raise the share"
            )
        return min(fit, useful)

    def create_pool(self, layout: KVLayout, blocks: int) -> KVPool:
        return KVPool.create(layout, blocks)

    def export_pool(self, pool: KVPool) -> PoolHandle:
        return pool.handle()

    def attach_pool(self, handle: PoolHandle, layout: KVLayout) -> KVPool:
        return KVPool.attach_handle(handle, layout)

    def attention(self, config: ModelConfig, pool: KVPool) -> AttentionBackend:
        if self._native_attention and NativeAttention.suits(config, pool):
            try:
                return NativeAttention(config, pool)
            except NoCompiler as error:
                log.warning("attention runs in plain torch, which is several times slower: %s", error)
        return GatheredAttention(config, pool)


def step_bytes(config: ModelConfig, bounds: StepBounds, itemsize: int) -> int:
    """Memory of the largest step besides weights and pool.

    The widest moment of a layer: the residual, its norm, and the MLP's product, its activated half and its output, or
    the attention's counterparts. Logits: as the head gives them, a copy that is adjusted, weights of draws, and slack.
    """
    widest = max(3 * config.intermediate_size, 2 * (config.q_size + 2 * config.kv_size) + config.q_size)
    layer = bounds.tokens * (3 * config.hidden_size + widest) * itemsize
    logits = 4 * bounds.slots * config.vocab_size * 4
    return layer + logits
