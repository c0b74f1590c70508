"""The layout of a model's KV blocks."""

from __future__ import annotations

from baton.kvpool.layout import KVKind, KVLayout
from baton.models.config import ModelConfig


def kv_layout(config: ModelConfig, block_size: int, kind: KVKind) -> KVLayout:
    return KVLayout(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=kind.dtype,
        format=kind.format,
    )
