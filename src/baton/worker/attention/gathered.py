"""Attention in plain torch: copy a sequence's blocks together, then the textbook formula.

The oracle, and the fallback. Only computed tokens are copied: the rest of a block may hold anything, NaN included, and zero
times NaN is not zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kvpool.base import Pool
from baton.models.config import ModelConfig
from baton.models.layers.attention import AttentionContext, shares_of
from baton.worker.attention.pool_tensors import PoolTensors, pool_tensors
from baton.worker.flat_batch import Spans


class GatheredAttention:
    name = "gathered"

    def __init__(self, config: ModelConfig, pool: Pool) -> None:
        self.config = config
        self.block_size = pool.layout.block_size
        self.pool = pool_tensors(pool)

    def begin(self, spans: Spans) -> AttentionContext:
        return _Step(self.config, self.pool, self.block_size, spans)


class _Step:
    def __init__(self, config: ModelConfig, pool: PoolTensors, block_size: int, spans: Spans) -> None:
        self.config = config
        self.pool = pool
        self.size = block_size
        self.spans = [
            (begin, end, context, self._table(spans, slot, context + end - begin))
            for slot, begin, end, context in zip(
                spans.slots.tolist(),
                spans.starts[:-1].tolist(),
                spans.starts[1:].tolist(),
                spans.contexts.tolist(),
                strict=True,
            )
        ]

    def _table(self, spans: Spans, slot: int, tokens: int) -> Tensor:
        return torch.from_numpy(spans.tables[slot, : -(-tokens // self.size)]).to(self.pool.keys.device, torch.int64)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, /) -> Tensor:
        out = torch.empty(q.shape[0], self.config.q_size, dtype=q.dtype, device=q.device)
        for begin, end, context, table in self.spans:
            self._store(layer, k[begin:end], v[begin:end], context, table)
            out[begin:end] = self._attend(layer, q[begin:end], context, table, sinks)
        return out

    def _store(self, layer: int, k: Tensor, v: Tensor, context: int, table: Tensor) -> None:
        position = torch.arange(context, context + k.shape[0], device=k.device)
        blocks, places = table[position // self.size], position % self.size
        self.pool.keys[blocks, layer, :, :, places] = k.to(self.pool.keys.dtype)
        self.pool.values[blocks, layer, :, places] = v.to(self.pool.values.dtype)

    def _attend(self, layer: int, q: Tensor, context: int, table: Tensor, sinks: Tensor | None) -> Tensor:
        config, rows = self.config, q.shape[0]
        total = context + rows
        # [blocks, kv_head, head_dim, token] -> [kv_head, head_dim, tokens]; values likewise with the last two swapped.
        keys = self.pool.keys[table, layer].permute(1, 2, 0, 3).flatten(2)[:, :, :total].to(q.dtype)
        values = self.pool.values[table, layer].permute(1, 0, 2, 3).flatten(1, 2)[:, :total].to(q.dtype)
        grouped = q.reshape(rows, config.kv_heads, -1, config.head_dim).permute(
            1, 2, 0, 3
        )  # [kv_head, head of group, row, head_dim]
        scores = (grouped @ keys[:, None]).float() * config.attention_scale
        seen = torch.arange(total, device=q.device)
        at = torch.arange(context, total, device=q.device)[:, None]
        hidden = seen > at
        window = config.window(layer)
        if window is not None:
            hidden |= seen <= at - window
        of_group = None if sinks is None else sinks.view(config.kv_heads, -1)
        shares = shares_of(scores.masked_fill_(hidden, float("-inf")), of_group).to(q.dtype)
        return (shares @ values[:, None]).permute(2, 0, 1, 3).flatten(1)
