"""From settings to a runner that takes plans: threads, model, pool."""

from __future__ import annotations

import os

import torch

from baton.config import WorkerConfig
from baton.errors import InvalidConfig
from baton.models.load import load_model
from baton.models.loaders.weights import Progress
from baton.worker.kv_pool import KVLayout
from baton.worker.model_runner import ModelRunner
from baton.worker.platforms.cpu import GIB, CpuPlatform


def build_runner(config: WorkerConfig, progress: Progress | None = None) -> ModelRunner:
    torch.set_num_threads(config.threads or usable_cores())
    platform = CpuPlatform()
    model = load_model(config.model, dtype=getattr(torch, config.dtype), device=platform.device, progress=progress)
    context = config.context_tokens_max or model.config.context_tokens_max
    if context > model.config.context_tokens_max:
        raise InvalidConfig(
            f"context_tokens_max is {context}, and the model was made for {model.config.context_tokens_max}: lower it"
        )
    layout = KVLayout.of(model.config, config.block_size, model.model.dtype)
    blocks = config.blocks or blocks_in(config, layout, context)
    return ModelRunner(model, platform, slots=config.slots, blocks=blocks, block_size=config.block_size)


def blocks_in(config: WorkerConfig, layout: KVLayout, context: int) -> int:
    """As many as the memory holds, and no more than all slots could fill with whole contexts."""
    fit = int(config.kv_memory_gib * GIB) // layout.block_bytes
    needed = -(-context // config.block_size)
    if fit < needed:
        raise InvalidConfig(
            f"kv_memory_gib is {config.kv_memory_gib:g}: that is {fit} KV blocks of {config.block_size} tokens, and one "
            f"sequence of {context} tokens needs {needed}; raise kv_memory_gib or lower context_tokens_max"
        )
    return min(fit, config.slots * needed)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
