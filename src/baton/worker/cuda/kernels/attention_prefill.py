"""Attention of chunks of prompts: many rows of a sequence against its tokens in the pool and against each other.

A program has a tile of rows of one sequence, for one kv head; the query heads that share it are packed into the tile:

keys           |---- context + rows before the tile: no mask ----|-- the tile's own: masked --|
rows of a tile    (row 0, head 0) (row 0, head 1) ... (row 1, head 0) ...

The tiles of all sequences are one list, built on the host (prefill_tiles): a mixed batch has no empty programs, and the tiles
with the most work start first.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from baton.worker.cuda.kernels.attention_decode import LOG2_E, sink_shares
from baton.worker.cuda.kernels.sizes import next_power_of_2


class Tiling(NamedTuple):
    queries: int
    "Rows per tile: tokens times query heads."
    keys: int
    "Tokens per visit."
    warps: int = 4
    stages: int = 3


TILING = Tiling(128, 64)
FLOAT32_TILING = Tiling(32, 32)
"""Products in float32 are unrolled, and larger tiles do not fit the registers: with 128 rows a compiler needs most of a minute,
and threads have 17 KB of memory each, which is 13 GiB of a GPU."""


def tiling_of(dtype: torch.dtype) -> Tiling:
    """dtype: of the queries."""
    return FLOAT32_TILING if dtype == torch.float32 else TILING


def rows_per_tile(heads: int, kv_heads: int, dtype: torch.dtype) -> int:
    return max(1, tiling_of(dtype).queries // next_power_of_2(heads // kv_heads))


def prefill_tiles(
    sequences: NDArray[np.int64], counts: NDArray[np.int64], contexts: NDArray[np.int64], rows: int
) -> NDArray[np.int32]:
    """int32 [tiles, 2]: the sequence, and the tile's first row in it. `counts`, `contexts`: of these sequences."""
    tiles = -(-counts // rows)
    of = np.repeat(np.arange(len(sequences)), tiles)
    first = (np.arange(len(of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * rows
    longest_first = np.argsort(-(contexts[of] + first), kind="stable")
    found: NDArray[np.int32] = np.stack((sequences[of], first), 1)[longest_first].astype(np.int32)
    return found


@triton.jit
def _visit(queries, peak, total, found, start, position, end, table, keys_at, block_stride, scale, dim,
           DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, VALUES_AFTER: tl.constexpr, WINDOW: tl.constexpr,
           TILE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Processes one tile of tokens and updates the running softmax of the rows."""
    token = start + tl.arange(0, TILE)
    in_dim = dim < DIM
    if MASKED:
        block = tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0).to(tl.int64)
        place = (block * block_stride + (token % BLOCK_SIZE) * DIM)[:, None]
        mask = (token < end)[:, None] & in_dim
        keys = tl.load(keys_at + place, mask=mask, other=0.0)
        values = tl.load(keys_at + place + VALUES_AFTER, mask=mask, other=0.0)
    else:
        block = tl.load(table + token // BLOCK_SIZE).to(tl.int64)
        place = (block * block_stride + (token % BLOCK_SIZE) * DIM)[:, None]
        if dim.shape[1] == DIM:
            keys = tl.load(keys_at + place)
            values = tl.load(keys_at + place + VALUES_AFTER)
        else:
            keys = tl.load(keys_at + place, mask=in_dim, other=0.0)
            values = tl.load(keys_at + place + VALUES_AFTER, mask=in_dim, other=0.0)
    keys, values = keys.to(queries.dtype), values.to(queries.dtype)  # converts from a pool in fp8
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    if MASKED:
        seen = token[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (token[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    if WINDOW > 0:  # a row whose window begins after this tile has no score yet
        higher = tl.where(higher == float("-inf"), 0.0, higher)
    shares = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(peak - higher)
    found = found * fade[:, None]
    found = tl.dot(shares.to(values.dtype), values, found, input_precision=PRECISION)
    total = total * fade + tl.sum(shares, 1)
    return higher, total, found


@triton.jit
def _prefill(
    q, pool, tables, slots, starts, contexts, tiles, sinks, out,
    q_stride, out_stride, table_stride, block_stride, layer_offset, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    DIM_PADDED: tl.constexpr, PRECISION: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.load(tiles + 2 * tl.program_id(1))
    if sequence < 0:
        return  # padding
    first = tl.load(tiles + 2 * tl.program_id(1) + 1)
    start_row = tl.load(starts + sequence)
    context = tl.load(contexts + sequence)
    count = tl.load(starts + sequence + 1) - start_row
    in_tile = tl.arange(0, QUERIES)
    row = first + in_tile // GROUP_PADDED
    of_group = in_tile % GROUP_PADDED
    real = (row < count) & (of_group < GROUP)
    dim = tl.arange(0, DIM_PADDED)[None, :]
    mask = real[:, None] & (dim < DIM)
    column = ((head * GROUP + of_group) * DIM)[:, None] + dim
    queries = tl.load(q + (start_row + row).to(tl.int64)[:, None] * q_stride + column, mask=mask, other=0.0)
    table = tables + tl.load(slots + sequence).to(tl.int64) * table_stride
    keys_at = pool + layer_offset + head * (BLOCK_SIZE * DIM) + dim
    values_after: tl.constexpr = KV_HEADS * BLOCK_SIZE * DIM
    position = context + row
    end = context + tl.minimum(first + ROWS, count)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, DIM_PADDED], tl.float32)
    begin = 0
    masked_from = (context + first + 1) // TILE * TILE
    if WINDOW > 0:
        begin = tl.maximum(context + first + 1 - WINDOW, 0) // TILE * TILE
        masked_from = begin
    else:
        for start in tl.range(0, masked_from, TILE, num_stages=STAGES):
            peak, total, found = _visit(
                queries, peak, total, found, start, position, end, table, keys_at, block_stride, scale, dim,
                DIM, BLOCK_SIZE, values_after, WINDOW, TILE, False, PRECISION,
            )  # fmt: skip
    for start in tl.range(masked_from, end, TILE, num_stages=STAGES):
        peak, total, found = _visit(
            queries, peak, total, found, start, position, end, table, keys_at, block_stride, scale, dim,
            DIM, BLOCK_SIZE, values_after, WINDOW, TILE, True, PRECISION,
        )  # fmt: skip
    if SINKS:
        total += sink_shares(sinks, head * GROUP + of_group, real, peak)
    out_at = out + (start_row + row).to(tl.int64)[:, None] * out_stride + column
    tl.store(out_at, (found / total[:, None]).to(out.dtype.element_ty), mask=mask)


def attend_prefill(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    heads: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    fixed: bool = False,
) -> None:
    """q: [rows, at least heads * head_dim] of a flat batch, rotated -> out [rows, heads * head_dim].

    slots, contexts: int32 by sequence, starts: int32 [sequences + 1] (flat_batch.py). tiles: prefill_tiles with rows_per_tile;
    rows outside of tiles are skipped. sinks: [heads], or None if the model has none.

    fixed: the bits of a row do not depend on the start of its chunk. The compiler would fuse a product and a sum in tiles
    without a mask, but not in those with one; here both round twice.
    """
    kv_heads, block_size, dim = pool.shape[3:]
    group = heads // kv_heads
    tiling = tiling_of(q.dtype)
    padded = next_power_of_2(group)
    _prefill[(kv_heads, len(tiles))](
        *(q, pool, tables, slots, starts, contexts, tiles, q if sinks is None else sinks, out),
        *(q.stride(0), out.stride(0), tables.stride(0), pool.stride(0), layer * pool.stride(1), scale * LOG2_E),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PADDED=padded,
        DIM=dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        QUERIES=max(tiling.queries, padded),
        ROWS=rows_per_tile(heads, kv_heads, q.dtype),
        TILE=tiling.keys,
        STAGES=tiling.stages,
        DIM_PADDED=max(16, next_power_of_2(dim)),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        SINKS=sinks is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=not fixed,
    )
