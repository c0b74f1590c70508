"""The layout of a model's KV blocks."""

from __future__ import annotations

from baton.kvpool.layout import KVKind, KVLayout
from baton.models.config import ModelConfig
from baton.models.encoders.config import EncoderConfig


def kv_layout(config: ModelConfig | EncoderConfig, block_size: int, kind: KVKind) -> KVLayout:
    """The layout of the model's blocks. Blocks of an encoder hold nothing, but the scheduler counts them: they have the
    smallest layout."""
    if isinstance(config, EncoderConfig):
        return KVLayout(layers=1, kv_heads=1, head_dim=2, block_size=block_size, dtype=kind.dtype, format=kind.format)
    return KVLayout(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=kind.dtype,
        format=kind.format,
    )
