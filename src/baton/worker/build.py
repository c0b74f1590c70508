"""From settings to a runner that takes plans: model, pool, and the longest sequence that the pool can hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.config import WorkerConfig
from baton.errors import InvalidConfig
from baton.kvpool.layout import KVLayout
from baton.kvpool.memory import GIB
from baton.kvpool.pool import KVPool
from baton.models.generation import sampling_defaults
from baton.models.loaders.weights import Progress
from baton.models.names import resolve
from baton.models.open import open_model
from baton.worker.identity import identity_of
from baton.worker.kv_layout import kv_layout
from baton.worker.model_runner import ModelRunner
from baton.worker.platforms.base import Platform
from baton.worker.platforms.cpu import CpuPlatform, usable_cores
from baton.worker.weights_digest import Digest, DigestInProgress

CONTEXT_TOKENS_MIN = 2
"""A prompt and an answer of one token each: with less nothing can be asked."""


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    runner: ModelRunner
    context_tokens: int
    "Longest sequence, prompt and output. One of this length always fits the pool."
    sampling_defaults: dict[str, int | float]
    "For requests that do not say (models/generation.py)."
    identity: bytes
    "KVIdentity.digest() of what is loaded."
    weights_digest: Digest


@dataclass(frozen=True, slots=True)
class PoolSize:
    blocks: int
    context_tokens: int


PoolSource = Callable[[Platform, KVLayout, int], KVPool]
"""Makes the pool of so many blocks, or comes to it in another way."""


def own_pool(platform: Platform, layout: KVLayout, blocks: int) -> KVPool:
    return platform.create_pool(layout, blocks)


def layout_of(config: WorkerConfig) -> KVLayout:
    """What a worker with these settings will compute on. Reads no weights."""
    opened = open_model(resolve(config.model))
    return kv_layout(opened.config, config.block_size, CpuPlatform().kv_dtype(opened.config, config))


def build_worker(config: WorkerConfig, progress: Progress | None = None, pool_source: PoolSource = own_pool) -> BuiltWorker:
    """What is wrong with the settings is said before any weights are read."""
    platform = CpuPlatform()
    opened = open_model(resolve(config.model, progress=progress))
    defaults = sampling_defaults(opened.recommended, config.generation_config, str(opened.path))
    layout = kv_layout(opened.config, config.block_size, platform.kv_dtype(opened.config, config))
    size = fit_pool(config, layout, opened.config.context_tokens_max)
    with DigestInProgress(opened.files, config.threads or usable_cores()) as digesting:
        loaded = platform.load(opened, config, progress)
        weights = digesting.result()
    pool = pool_source(platform, layout, size.blocks)
    runner = ModelRunner(loaded.with_pool(pool), pool, slots=config.slots)
    identity = identity_of(opened, weights.value, config, layout, runner.forward.arithmetic).digest()
    return BuiltWorker(runner, size.context_tokens, defaults, identity, weights)


def fit_pool(config: WorkerConfig, layout: KVLayout, model_context: int) -> PoolSize:
    """As many blocks as are given or fit, and no more than all slots could fill with whole contexts.

    A context that nobody asked for is lowered to what the pool holds: a longer sequence could never run to its end. One
    that was asked for and does not fit is refused.
    """
    asked, size = config.context_tokens_max, config.block_size
    if asked is not None and asked > model_context:
        raise InvalidConfig(f"context_tokens_max is {asked}, and the model was made for {model_context}: lower it")
    if config.blocks is not None:
        fit, given, option = config.blocks, f"kv_blocks is {config.blocks}", "kv_blocks"
    else:
        fit, option = int(config.kv_memory_gib * GIB) // layout.block_bytes, "kv_memory_gib"
        given = f"kv_memory_gib is {config.kv_memory_gib:g}: that is {fit} KV blocks"
    held = fit * size
    if held < max(asked or 0, CONTEXT_TOKENS_MIN):
        wanted = asked or CONTEXT_TOKENS_MIN
        needed = -(-wanted // size)
        instead = f", or lower context_tokens_max to {held}" if asked and held >= CONTEXT_TOKENS_MIN else ""
        raise InvalidConfig(
            f"{given}, and a context of {wanted} tokens needs {needed} blocks of {size} tokens "
            f"({needed * layout.block_bytes / GIB:.2g} GiB): raise {option}{instead}"
        )
    context = min(asked or model_context, held)
    return PoolSize(fit if config.blocks is not None else min(fit, config.slots * -(-context // size)), context)
