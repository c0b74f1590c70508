"""The C kernel (csrc/paged_attention.c): attention on the blocks where they lie. Float32.

A call costs a few microseconds besides its work, releases the GIL, and stores this layer's keys and values on the way.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.layers.attention import AttentionContext
from baton.worker.attention.build import load_library
from baton.worker.flat_batch import Spans
from baton.worker.kv_pool import KVPool

SOURCE = Path(__file__).parent.parent / "csrc" / "paged_attention.c"

HEAD_DIM_MAX = 1024
"""The kernel keeps 48 rows of queries and of outputs on its stack."""
BLOCK_SIZE_MAX = 1024
SMALL_WORK = 1 << 17
"""Products of a layer below which a second thread costs more than it brings."""


class _Step(ctypes.Structure):
    """Mirrors `Step` in the C source."""

    _fields_ = (
        *[(name, ctypes.c_int64) for name in ("sequences", "heads", "kv_heads", "head_dim", "block_size")],
        *[(name, ctypes.c_int64) for name in ("block_stride", "values_at", "table_stride")],
        *[(name, ctypes.c_void_p) for name in ("tables", "slots", "starts", "contexts", "item_starts")],
    )


@cache
def _library() -> ctypes.CDLL:
    library = load_library(SOURCE)
    heads = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    library.baton_paged_attention.argtypes = (
        *(ctypes.c_void_p, ctypes.c_void_p),
        *(heads * 3),
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int64),
    )
    library.baton_paged_attention.restype = None
    library.baton_rows_per_item.argtypes = ()
    library.baton_rows_per_item.restype = ctypes.c_int64
    return library


class NativeAttention:
    name = "native"

    def __init__(self, config: ModelConfig, pool: KVPool, *, threads: int | None = None) -> None:
        """`threads`: None means as many as torch uses at the time of a step. Raises NoCompiler where there is none."""
        library = _library()
        self.call = library.baton_paged_attention
        self.rows_per_item = int(library.baton_rows_per_item())
        self.config = config
        self.pool = pool
        self.threads = threads
        self.windows = [config.window(layer) or 0 for layer in range(config.layers)]
        first, layout = pool.data.ctypes.data, pool.layout
        self.layer_addresses = [first + layer * 2 * layout.half * layout.itemsize for layer in range(layout.layers)]

    @staticmethod
    def suits(config: ModelConfig, pool: KVPool) -> bool:
        layout = pool.layout
        return layout.dtype == "float32" and layout.head_dim <= HEAD_DIM_MAX and layout.block_size <= BLOCK_SIZE_MAX

    def begin(self, spans: Spans) -> AttentionContext:
        return _StepAttention(self, spans)


class _StepAttention:
    __slots__ = ("arrays", "backend", "step", "step_address", "threads")

    def __init__(self, backend: NativeAttention, spans: Spans) -> None:
        config, layout = backend.config, backend.pool.layout
        counts = spans.counts
        rows = counts * (config.heads // config.kv_heads)
        item_starts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(-(-rows // backend.rows_per_item) * config.kv_heads, out=item_starts[1:])
        self.backend = backend
        self.arrays = (spans, item_starts)  # the kernel reads them: they live as long as the step
        self.step = _Step(
            *(len(counts), config.heads, config.kv_heads, config.head_dim, layout.block_size),
            *(layout.block_numbers, layout.half, spans.tables.strides[0] // spans.tables.itemsize),
            *(array.ctypes.data for array in (spans.tables, spans.slots, spans.starts, spans.contexts, item_starts)),
        )
        self.step_address = ctypes.addressof(self.step)
        work = int(((spans.contexts + counts) * counts).sum()) * config.q_size
        wanted = backend.threads or torch.get_num_threads()
        self.threads = 1 if work < SMALL_WORK else min(wanted, int(item_starts[-1]))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        backend = self.backend
        out = torch.empty(q.shape[0], backend.config.q_size, dtype=torch.float32)
        backend.call(
            self.step_address,
            backend.layer_addresses[layer],
            *(q.data_ptr(), q.stride(0), q.stride(1)),
            *(k.data_ptr(), k.stride(0), k.stride(1)),
            *(v.data_ptr(), v.stride(0), v.stride(1)),
            out.data_ptr(),
            backend.windows[layer],
            backend.config.attention_scale,
            self.threads,
        )
        return out
