"""The kernels' functions in plain torch, slow and readable: on any device, in any data type.

The oracle of the tests. Same arguments as in kernels/, except that results are returned instead of written to `out`. Sums are
float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT = torch.float64


def embed(token_ids: Tensor, slots: Tensor, last_tokens: Tensor, table: Tensor) -> Tensor:
    fed_back = last_tokens[slots.clamp(min=0).long()]
    return table[torch.where(token_ids < 0, fed_back, token_ids).clamp(min=0).long()]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(FLOAT)
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(FLOAT)).to(x.dtype)


def add_norm(residual: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The new residual, and its norm."""
    if added is not None:
        residual = (residual.to(FLOAT) + added.to(FLOAT)).to(residual.dtype)
    return residual, norm(residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(FLOAT).chunk(2, -1)
    return (gate * gate.sigmoid() * up).to(gate_up.dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads: [rows, heads, dim]; cos, sin: [rows, dim / 2]."""
    first, second = heads.chunk(2, -1)
    cos, sin = cos[:, None].to(heads.dtype), sin[:, None].to(heads.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rope_store(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    tables: Tensor,
    pool: Tensor,
    layer: int,
    *,
    heads: int,
) -> Tensor:
    """The rotated queries [rows, heads, dim]; keys and values are written to the pool. Padding rows are zero."""
    kv_heads, block_size, dim = pool.shape[3:]
    wide = qkv.view(len(qkv), -1, dim).to(FLOAT)
    q, k, v = wide[:, :heads], wide[:, heads : heads + kv_heads], wide[:, heads + kv_heads :]
    if norms is not None:
        q, k = norm(q, norms[0], eps), norm(k, norms[1], eps)
    at = positions.clamp(min=0).long()
    q, k = (rotate(x, angles[0][at], angles[1][at]) for x in (q, k))
    for row, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        if position >= 0:
            block = tables[slot, position // block_size].long()
            pool[block, layer, 0, :, position % block_size] = k[row].to(pool.dtype)
            pool[block, layer, 1, :, position % block_size] = v[row].to(pool.dtype)
    return (q * (positions >= 0)[:, None, None]).to(qkv.dtype)


def attend(
    q: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tensor,
    slots: Tensor,
    starts: Tensor,
    contexts: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """q: [rows, heads, dim] of a flat batch -> [rows, heads * dim].

    Keys and values of the rows are already in the pool. Only computed tokens are copied: the rest of a block may hold anything,
    NaN included.
    """
    kv_heads, block_size, dim = pool.shape[3:]
    out = torch.zeros(len(q), q.shape[1] * dim, dtype=q.dtype, device=q.device)
    bounds = starts.tolist()
    for sequence, (slot, context) in enumerate(zip(slots.tolist(), contexts.tolist(), strict=True)):
        begin, end = bounds[sequence], bounds[sequence + 1]
        total = context + end - begin
        blocks = tables[slot, : -(-total // block_size)].long()
        keys, values = pool[blocks, layer].to(FLOAT).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :total]  # [kv_head, token, dim]
        mine = q[begin:end].to(FLOAT).view(end - begin, kv_heads, -1, dim).permute(1, 2, 0, 3)  # [kv_head, of group, row, dim]
        scores = mine @ keys[:, None].transpose(-1, -2) * scale
        token = torch.arange(total, device=q.device)
        position = torch.arange(context, total, device=q.device)[:, None]
        unseen = token > position
        if window is not None:
            unseen = unseen | (token <= position - window)
        shares = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        out[begin:end] = (shares @ values[:, None]).permute(2, 0, 1, 3).flatten(1).to(q.dtype)
    return out
