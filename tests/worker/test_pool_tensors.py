"""The KV pool as torch sees it."""

from __future__ import annotations

import pytest
import torch

from baton.errors import InvariantBroken
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool
from baton.worker.attention.pool_tensors import pool_tensors


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_are_the_same_memory(dtype):
    layout = KVLayout(layers=2, kv_heads=3, head_dim=4, block_size=5, dtype=dtype)
    pool = KVPool.create(layout, 3)
    tensors = pool_tensors(pool)
    assert tensors.keys.dtype == tensors.values.dtype == getattr(torch, dtype)
    assert pool.data.itemsize == layout.itemsize == tensors.keys.dtype.itemsize
    tensors.keys[1, 1, 2, 3, 4] = 1.0
    tensors.values[1, 1, 2, 4, 3] = 2.0
    bits = {"float32": (0x3F800000, 0x40000000), "float16": (0x3C00, 0x4000), "bfloat16": (0x3F80, 0x4000)}[dtype]
    words = pool.data.view(f"u{layout.itemsize}")
    assert tuple(words[words != 0]) == bits
    del words
    with pytest.raises(InvariantBroken, match="still in use"):
        pool.close()
