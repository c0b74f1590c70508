"""Random queries, keys and values, with junk in the pool wherever nothing was computed; and the kernel in torch's socket."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from kernels import Team
from steps import Paged, Part

from baton.kvpool.layout import KVDtype, KVFormat, KVKind
from baton.kvpool.pool import KVPool
from baton.models.config import ModelConfig, RopeConfig, Traits
from baton.native.library import NativeShape, NativeStep
from baton.worker.flat_batch import Spans
from baton.worker.forward.native_forward import KV_KINDS
from baton.worker.kv_layout import kv_layout


@dataclass(frozen=True, kw_only=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    sinks: bool = False
    dtype: KVDtype = "float32"
    format: KVFormat = "turned"

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
            traits=Traits(layer_windows=(None, self.window), sinks=self.sinks),
            context_tokens_max=4096,
        )


class History(Paged):
    """Sequences with all their queries, keys and values, from which any step can be cut: q, k, v are [tokens, heads, dim]."""

    def __init__(self, shape: Shape, lengths: list[int], seed: int = 0) -> None:
        super().__init__(lengths, shape.block_size, seed)
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        self.q = [torch.randn(n, shape.heads, shape.head_dim, generator=generator) for n in lengths]
        self.k = [torch.randn(n, shape.kv_heads, shape.head_dim, generator=generator) for n in lengths]
        self.v = [torch.randn(n, shape.kv_heads, shape.head_dim, generator=generator) for n in lengths]
        self.sinks = torch.randn(shape.heads, generator=generator) * 4 if shape.sinks else None

    def pool(self) -> KVPool:
        pool = KVPool.create(
            kv_layout(self.shape.config(), self.shape.block_size, KVKind(self.shape.dtype, self.shape.format)), self.blocks
        )
        pool.data.view(np.uint8).fill(0xFF)  # not-a-number, in every type
        return pool

    def rows(self, parts: list[Part]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the model hands them over: queries and keys are views with gaps."""
        q, k, v = (torch.cat([x[s][at : at + n] for s, at, n in parts]) for x in (self.q, self.k, self.v))
        qkv = torch.cat((q, k, v), 1)
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]

    def run(self, backend, parts: list[Part], layer: int) -> list[torch.Tensor]:
        """One layer of one step; the result by part."""
        out = backend.begin(self.spans(parts))(layer, *self.rows(parts), self.sinks)
        return list(out.split([count for _, _, count in parts]))


class KernelAttention:
    """The library's attention where the forward pass in torch has its own (worker/attention/gathered.py)."""

    def __init__(self, team: Team, config: ModelConfig, pool: KVPool) -> None:
        self._team = team
        self._config = config
        self._pool = pool

    def begin(self, spans: Spans) -> KernelAttention:
        self._spans = spans
        return self

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        config, layout, spans = self._config, self._pool.layout, self._spans
        qkv = torch.cat((q, k, v), 1).contiguous().numpy()
        out = np.full((len(qkv), config.q_size), np.nan, np.float32)
        arrays = (spans.tables, spans.slots, spans.starts, spans.contexts)
        step = NativeStep(len(spans.slots), len(qkv), spans.tables.shape[1], *(array.ctypes.data for array in arrays))
        shape = NativeShape(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_size=layout.block_size,
            block_stride=layout.block_numbers,
            values_at=layout.half,
            scale=config.attention_scale,
        )
        address = self._pool.data.ctypes.data + layer * 2 * layout.half * layout.itemsize
        kind, window = KV_KINDS[layout.kind], config.window(layer) or 0
        beside = None if sinks is None else sinks.data_ptr()
        failed = self._team.library.attention(
            self._team.runner, step, shape, address, qkv.ctypes.data, window, beside, kind, out.ctypes.data
        )
        assert not failed
        return torch.from_numpy(out)
