"""Attention of sequences that run one token each: a query per head against all of the sequence's tokens in the pool.

Memory is the limit: each byte of KV is read once. So the query heads that share a kv head are one tile (padded to 16 rows for
the tensor cores), and long sequences are divided into splits, so that few sequences fill the chip too:

tokens of a sequence   |--- split 0 ---|--- split 1 ---|- 2 -|      a program each, and for each kv head
                               \\________ combined by the program that finishes last ________/

A tile of TILE tokens is not tied to the blocks of the pool: each token's block is looked up in the table. The size of a split
is read from device memory, so one CUDA graph serves all lengths. With a size independent of the batch (FIXED_SPLIT_TOKENS) the
bits of the result are independent of it too.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import next_power_of_2

LOG2_E = 1.4426950408889634


class DecodeTuning(NamedTuple):
    """Sizes of the kernel, measured on an H200 with 8 kv heads of 128 (docs/internals/notes/gpu-kernels.md)."""

    tile: int
    warps: int
    stages: int
    splits: int
    "Maximum of splits per sequence."


def tuning_for(rows: int, kv_heads: int = 8, *, even: bool = False) -> DecodeTuning:
    """The sizes for this number of sequences. even: they have about equal lengths. Then the splits of an average sequence
    suffice, and programs without work, which cost up to a tenth, are not launched."""
    if rows <= 2:
        tuning = DecodeTuning(64, 2, 4, 32)
    elif rows <= 12:
        tuning = DecodeTuning(64, 2, 6, 16)
    elif rows <= 16:
        tuning = DecodeTuning(128, 4, 5, 4)
    elif rows <= 48:
        tuning = DecodeTuning(64, 2, 6, 4)
    elif rows <= 96:
        tuning = DecodeTuning(64, 2, 4, 2)
    else:
        tuning = DecodeTuning(128, 4, 3, 2)
    return tuning._replace(splits=min(tuning.splits, _splits_for(rows, kv_heads))) if even else tuning


def _splits_for(rows: int, kv_heads: int) -> int:
    """Splits of a sequence of average length: about 256 programs (128 where that is better) get equal work."""
    programs = 128 if rows <= 2 or 12 < rows <= 16 else 256
    return max(1, round(programs / (rows * kv_heads)))


FIXED_TUNING = DecodeTuning(64, 2, 6, 32)
FIXED_SPLIT_TOKENS = 256
"""Sizes for results independent of the batch: the smallest loss over all batch sizes."""


def split_tokens_for(lengths_sum: int, rows: int, kv_heads: int) -> int:
    """Tokens per split. A sequence of average length leaves no remainder."""
    return max(64, -(-lengths_sum // (rows * _splits_for(rows, kv_heads)) // 32) * 32)


class DecodeScratch:
    """Partial results of splits; one object serves all layers and all steps of a stream."""

    def __init__(
        self,
        rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        tunings: Sequence[DecodeTuning] | None = None,
    ) -> None:
        """Memory for up to `rows` sequences. `tunings`: the tunings in use, if not those of tuning_for."""
        group = next_power_of_2(heads // kv_heads)
        if tunings is None:
            parts = max(tuning_for(n).splits * n for n in range(1, rows + 1)) * kv_heads
        else:
            parts = max(tuning.splits for tuning in tunings) * rows * kv_heads
        self.values = torch.empty(parts * group * head_dim, dtype=torch.float32, device=device)
        self.sums = torch.empty(parts * group * 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)


@triton.jit
def sink_shares(sinks, head, real, peak):
    """The sink's part of the sum of a head's shares: a learned score without a value."""
    score = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32)
    return tl.exp2(score * 1.4426950408889634 - peak)


@triton.jit
def _decode(
    q, pool, tables, slots, positions, order, split_tokens, sinks, out, part_values, part_sums, arrived,
    q_stride, out_stride, table_stride, block_stride, layer_offset, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr,
    QUERIES: tl.constexpr, GROUP_PADDED: tl.constexpr, DIM_PADDED: tl.constexpr,
    PRECISION: tl.constexpr, ORDERED: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Splits are the slowest dimension: programs of unused splits come last, and delay no others.
    head, place, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ORDERED:
        row = tl.load(order + place)
        if row < 0:
            return  # padding
    else:
        row = place
    length = tl.load(positions + row) + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    size = tl.maximum(tl.load(split_tokens), tl.cdiv(length - first, SPLITS))
    begin = first + split * size
    if begin >= length:
        return  # a short sequence, or padding
    end = tl.minimum(begin + size, length)
    used = tl.cdiv(length - first, size)

    query = tl.arange(0, QUERIES)[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    in_dim = dim < DIM
    q_at = q + row.to(tl.int64) * q_stride + (head * GROUP + query) * DIM + dim
    queries = tl.load(q_at, mask=(query < GROUP) & in_dim, other=0.0)
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride
    keys_at = pool + layer_offset + head * (BLOCK_SIZE * DIM) + dim
    values_after: tl.constexpr = KV_HEADS * BLOCK_SIZE * DIM
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, DIM_PADDED], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        inside = token < end
        block = tl.load(table + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        here = (block * block_stride + (token % BLOCK_SIZE) * DIM)[:, None]
        keys = tl.load(keys_at + here, mask=inside[:, None] & in_dim, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(peak - higher)
        values = tl.load(keys_at + here + values_after, mask=inside[:, None] & in_dim, other=0.0).to(queries.dtype)
        found = found * fade[:, None] + tl.dot(shares.to(values.dtype), values, input_precision=PRECISION)
        total = total * fade + tl.sum(shares, 1)
        peak = higher

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    out_at = out + row.to(tl.int64) * out_stride + (head * GROUP + query) * DIM + dim
    if used == 1:
        if SINKS:
            line = tl.arange(0, QUERIES)
            total += sink_shares(sinks, head * GROUP + line, line < GROUP, peak)
        tl.store(out_at, (found / total[:, None]).to(out.dtype.element_ty), mask=(query < GROUP) & in_dim)
        return

    # Parts of one (sequence, kv head) are adjacent: [split, query, dim] and twice [split, query].
    pair = place * KV_HEADS + head
    part = pair.to(tl.int64) * SPLITS + split
    tl.store(part_values + (part * GROUP_PADDED + query) * DIM + dim, found, mask=(query < GROUP) & in_dim)
    line = tl.arange(0, QUERIES)
    tl.store(part_sums + part * 2 * GROUP_PADDED + line, peak, mask=line < GROUP)
    tl.store(part_sums + (part * 2 + 1) * GROUP_PADDED + line, total, mask=line < GROUP)
    tl.debug_barrier()  # all threads have stored before the counter is incremented
    if tl.atomic_add(arrived + pair, 1, sem="acq_rel") < used - 1:
        return
    tl.store(arrived + pair, 0)
    first_part = pair.to(tl.int64) * SPLITS
    line = tl.arange(0, GROUP_PADDED)
    each = tl.arange(0, SPLITS_PADDED)[:, None]
    sums_at = part_sums + (first_part + each) * 2 * GROUP_PADDED + line[None, :]
    known = (each < used) & (line[None, :] < GROUP)
    peak_of_all = tl.max(tl.load(sums_at, mask=known, other=float("-inf"), cache_modifier=".cg"), 0)
    peak_of_all = tl.where(line < GROUP, peak_of_all, 0.0)
    all_found = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    all_total = tl.zeros([GROUP_PADDED], tl.float32)
    for some in range(0, used, 8):
        one = some + tl.arange(0, 8)
        these = (one < used)[:, None] & (line < GROUP)[None, :]
        at = part_sums + (first_part + one)[:, None] * 2 * GROUP_PADDED + line[None, :]
        weight = tl.exp2(tl.load(at, mask=these, other=float("-inf"), cache_modifier=".cg") - peak_of_all[None, :])
        all_total += tl.sum(weight * tl.load(at + GROUP_PADDED, mask=these, other=0.0, cache_modifier=".cg"), 0)
        at = part_values + ((first_part + one)[:, None, None] * GROUP_PADDED + line[None, :, None]) * DIM + dim[None, :, :]
        parts = tl.load(at, mask=these[:, :, None] & in_dim[None, :, :], other=0.0, cache_modifier=".cg")
        all_found += tl.sum(parts * weight[:, :, None], 0)
    if SINKS:
        all_total += sink_shares(sinks, head * GROUP + line, line < GROUP, peak_of_all)
    all_total = tl.where(line < GROUP, all_total, 1.0)
    out_at = out + row.to(tl.int64) * out_stride + (head * GROUP + line)[:, None] * DIM + dim
    tl.store(out_at, (all_found / all_total[:, None]).to(out.dtype.element_ty), mask=(line < GROUP)[:, None] & in_dim)


def attend_decode(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    order: torch.Tensor | None,
    split_tokens: torch.Tensor,
    scratch: DecodeScratch,
    out: torch.Tensor,
    *,
    heads: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    tuning: DecodeTuning | None = None,
    pdl: bool = False,
    fixed: bool = False,
) -> None:
    """q: [rows, at least heads * head_dim], rotated (the qkv product as rope_store left it) -> out [rows, heads * head_dim].

    slots, positions: int32 by row; a row's own key and value are in the pool already; position -1 is padding. order: int32
    [sequences] rows in order of start, best longest first. Other rows are skipped. None: all rows in order. split_tokens: int32
    [1]. tables, pool: as for rope_store. fixed: a product and a sum are rounded separately. sinks: [heads], of models that have
    them.
    """
    kv_heads, block_size, dim = pool.shape[3:]
    group = heads // kv_heads
    count = len(q) if order is None else len(order)
    tile, warps, stages, splits = tuning or tuning_for(count)
    _decode[(kv_heads, count, splits)](
        *(
            q,
            pool,
            tables,
            slots,
            positions,
            positions if order is None else order,
            split_tokens,
            q if sinks is None else sinks,
            out,
            scratch.values,
            scratch.sums,
            scratch.arrived,
        ),
        *(q.stride(0), out.stride(0), tables.stride(0), pool.stride(0), layer * pool.stride(1), scale * LOG2_E),
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        TILE=tile,
        STAGES=stages,
        SPLITS=splits,
        SPLITS_PADDED=next_power_of_2(splits),
        QUERIES=max(16, next_power_of_2(group)),
        GROUP_PADDED=next_power_of_2(group),
        DIM_PADDED=max(16, next_power_of_2(dim)),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        ORDERED=order is not None,
        SINKS=sinks is not None,
        PDL=pdl,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=pdl,
        enable_fp_fusion=not fixed,
    )
