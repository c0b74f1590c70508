"""Random steps for attention: sequences of any length in shuffled blocks, with junk wherever nothing was computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from baton.models.config import ModelConfig, RopeConfig, Traits
from baton.worker.flat_batch import Spans
from baton.worker.kv_pool import KVLayout, KVPool


@dataclass(frozen=True, kw_only=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None

    def config(self) -> ModelConfig:
        return ModelConfig(
            architecture="llama",
            vocab_size=64,
            layers=2,
            hidden_size=32,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=48,
            rope=RopeConfig(),
            norm_eps=1e-5,
            tied_embeddings=True,
            traits=Traits(layer_windows=(None, self.window)),
            context_tokens_max=4096,
        )


class History:
    """Sequences with all their queries, keys and values, from which any step can be cut: q, k, v are [tokens, heads, dim]."""

    def __init__(self, shape: Shape, lengths: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        self.lengths = lengths
        self.q = [torch.randn(n, shape.heads, shape.head_dim, generator=generator) for n in lengths]
        self.k = [torch.randn(n, shape.kv_heads, shape.head_dim, generator=generator) for n in lengths]
        self.v = [torch.randn(n, shape.kv_heads, shape.head_dim, generator=generator) for n in lengths]
        needed = [-(-n // shape.block_size) for n in lengths]
        self.blocks = sum(needed) + 2
        shuffled = np.random.default_rng(seed).permutation(self.blocks).astype(np.int32)
        self.tables = np.full((len(lengths), max(needed) + 1), 10**6, np.int32)  # a wrong entry reads far outside
        for slot, count in enumerate(needed):
            self.tables[slot, :count] = shuffled[sum(needed[:slot]) :][:count]

    def pool(self) -> KVPool:
        layout = KVLayout.of(self.shape.config(), self.shape.block_size, "float32")
        pool = KVPool.create(layout, self.blocks)
        pool.data.fill(np.nan)
        return pool

    def spans(self, parts: list[tuple[int, int, int]]) -> Spans:
        """`parts`: (sequence, tokens before this step, tokens in this step)."""
        starts = np.cumsum([0, *(count for _, _, count in parts)]).astype(np.int64)
        return Spans(self.tables, np.array([p[0] for p in parts], np.int64), starts, np.array([p[1] for p in parts], np.int64))

    def rows(self, parts: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the model hands them over: queries and keys are views with gaps."""
        q, k, v = (torch.cat([x[s][at : at + n] for s, at, n in parts]) for x in (self.q, self.k, self.v))
        qkv = torch.cat((q, k, v), 1)
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]

    def run(self, backend, parts: list[tuple[int, int, int]], layer: int) -> list[torch.Tensor]:
        """One layer of one step; the result by part."""
        out = backend.begin(self.spans(parts))(layer, *self.rows(parts))
        return list(out.split([count for _, _, count in parts]))
