"""The KV pool as torch tensors: the same memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton.kvpool.pool import KVPool


class PoolTensors(NamedTuple):
    keys: Tensor
    "[block, layer, kv_head, head_dim, token]."
    values: Tensor
    "[block, layer, kv_head, token, head_dim]."


def pool_tensors(pool: KVPool) -> PoolTensors:
    """They hold the pool's memory: it cannot be closed before they are gone."""
    dtype: torch.dtype = getattr(torch, pool.layout.dtype)
    return PoolTensors(torch.from_numpy(pool.keys).view(dtype), torch.from_numpy(pool.values).view(dtype))
