"""The KV pool as torch tensors: the same memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.kvpool.base import Pool
from baton.kvpool.device_pool import DevicePool
from baton.kvpool.pool import KVPool


class PoolTensors(NamedTuple):
    keys: Tensor
    "Keys, [block, layer, kv_head, head_dim, token]."
    values: Tensor
    "Values, [block, layer, kv_head, token, head_dim]."


def pool_tensors(pool: Pool) -> PoolTensors:
    """Views of the pool's memory: the pool cannot be closed before they are freed."""
    if isinstance(pool, DevicePool):
        both = device_tensor(pool)
        return PoolTensors(both[:, :, 0].transpose(-1, -2), both[:, :, 1])
    assert isinstance(pool, KVPool)
    dtype: torch.dtype = getattr(torch, pool.layout.dtype)
    return PoolTensors(torch.from_numpy(pool.keys).view(dtype), torch.from_numpy(pool.values).view(dtype))


class _DeviceMemory:
    """The CUDA array interface of memory that torch does not own."""

    def __init__(self, pool: DevicePool) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (pool.nbytes,),
            "typestr": "|u1",
            "data": (pool.address, False),
            "version": 3,
        }


def device_tensor(pool: DevicePool) -> Tensor:
    """The pool on the device, [block, layer, keys and values, kv_head, token, head_dim]."""
    layout = pool.layout
    flat = torch.as_tensor(_DeviceMemory(pool), device=f"cuda:{pool.device}")
    dtype: torch.dtype = getattr(torch, layout.dtype)
    shape = (pool.blocks, layout.layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)
    return flat.view(dtype).view(shape)
