"""From settings to a runner that takes plans: model, pool."""

from __future__ import annotations

from baton.config import WorkerConfig
from baton.errors import InvalidConfig
from baton.models.loaders.weights import Progress
from baton.models.names import resolve
from baton.models.open import open_model
from baton.worker.kv_pool import GIB, KVLayout
from baton.worker.model_runner import ModelRunner
from baton.worker.platforms.cpu import CpuPlatform


def build_runner(config: WorkerConfig, progress: Progress | None = None) -> ModelRunner:
    platform = CpuPlatform()
    opened = open_model(resolve(config.model, progress=progress))
    context = config.context_tokens_max or opened.config.context_tokens_max
    if context > opened.config.context_tokens_max:
        raise InvalidConfig(
            f"context_tokens_max is {context}, and the model was made for {opened.config.context_tokens_max}: lower it"
        )
    loaded = platform.load(opened, config, progress)
    layout = KVLayout.of(opened.config, config.block_size, loaded.kv_dtype)
    pool = platform.create_pool(layout, config.blocks or blocks_in(config, layout, context))
    return ModelRunner(loaded.with_pool(pool), pool, slots=config.slots)


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
