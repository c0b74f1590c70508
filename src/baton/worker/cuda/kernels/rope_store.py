"""Between the qkv product and attention: (norm of every head,) rotation, and keys and values into their blocks of the pool.

a row of qkv    |-- q heads --|-- k heads --|-- v heads --|
                    |  |            |  |          |
                    norm, rotate    norm, rotate  |
                    |               v             v
                 in place          block table[position // block_size], place position % block_size

Dimensions i and i + head_dim / 2 of a head rotate together. The angles come from a table, one row per position: every layer of
every step uses the same cosines and sines, in float32.
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2

HEADS_PER_PROGRAM = 8


@triton.jit
def _small(x):
    """Clamp to fp8's range. NaN and infinity become NaN: a row that reads it fails, as in other types."""
    return tl.where(tl.abs(x) < float("inf"), tl.clamp(x, -448.0, 448.0), float("nan"))


@triton.jit
def _rope_store(
    qkv, q_norm, k_norm, cosines, sines, positions, slots, tables, pool,
    table_stride, block_stride, layer_offset, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, SMALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    position = tl.load(positions + row)
    if position < 0:  # padding rows
        return
    slot = tl.load(slots + row).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    at = tl.arange(0, HALF)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (at < DIM // 2)
    here = qkv + row.to(tl.int64) * (HEADS + 2 * KV_HEADS) * DIM + head * DIM + at
    first = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(here + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    rotates = head < HEADS + KV_HEADS
    if NORM:
        inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1))[:, None] / DIM + eps)
        of_q = inside & (head < HEADS)
        of_k = inside & (head >= HEADS) & rotates
        spread = head * 0 + at
        scale = tl.load(q_norm + spread, mask=of_q, other=1.0).to(tl.float32)
        scale = tl.where(of_k, tl.load(k_norm + spread, mask=of_k, other=1.0).to(tl.float32), scale)
        first = tl.where(rotates, first * inverse * scale, first)
        scale = tl.load(q_norm + DIM // 2 + spread, mask=of_q, other=1.0).to(tl.float32)
        scale = tl.where(of_k, tl.load(k_norm + DIM // 2 + spread, mask=of_k, other=1.0).to(tl.float32), scale)
        second = tl.where(rotates, second * inverse * scale, second)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    angle = position.to(tl.int64) * (DIM // 2) + at
    cos = tl.load(cosines + angle, mask=at < DIM // 2, other=1.0)
    sin = tl.load(sines + angle, mask=at < DIM // 2, other=0.0)
    rotated_first = tl.where(rotates, first * cos - second * sin, first).to(qkv.dtype.element_ty)
    rotated_second = tl.where(rotates, second * cos + first * sin, second).to(qkv.dtype.element_ty)

    is_q = inside & (head < HEADS)
    tl.store(here, rotated_first, mask=is_q)
    tl.store(here + DIM // 2, rotated_second, mask=is_q)

    # In a block the values of all heads follow the keys of all heads: together they are one run of 2 * KV_HEADS heads.
    block = tl.load(tables + slot * table_stride + position // BLOCK_SIZE).to(tl.int64)
    place = (
        pool + block * block_stride + layer_offset + (head - HEADS) * (BLOCK_SIZE * DIM) + (position % BLOCK_SIZE) * DIM + at
    )
    is_kv = inside & (head >= HEADS)
    if SMALL:
        rotated_first = _small(rotated_first.to(tl.float32))
        rotated_second = _small(rotated_second.to(tl.float32))
    tl.store(place, rotated_first.to(pool.dtype.element_ty), mask=is_kv)
    tl.store(place + DIM // 2, rotated_second.to(pool.dtype.element_ty), mask=is_kv)


def rope_store(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    angles: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    *,
    heads: int,
    pdl: bool = False,
) -> None:
    """qkv: [rows, (heads + 2 * kv_heads) * head_dim]; queries are rotated in place, keys and values go to the pool.

    norms: weights of the norms of queries and keys, [head_dim] each, or None. angles: cosines and sines, float32 [positions,
    head_dim / 2]. positions: int32 [rows], -1 for padding. slots: int32 [rows], the row of `tables` int32 [slots, width]. pool:
    [blocks, layers, 2, kv_heads, block_size, head_dim].
    """
    kv_heads, block_size, dim = pool.shape[3:]
    q_norm, k_norm = norms or (qkv, qkv)
    _rope_store[(len(qkv), cdiv(heads + 2 * kv_heads, HEADS_PER_PROGRAM))](
        *(qkv, q_norm, k_norm, *angles, positions, slots, tables, pool),
        *(tables.stride(0), pool.stride(0), layer * pool.stride(1), eps),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_SIZE=block_size,
        NORM=norms is not None,
        GROUP=HEADS_PER_PROGRAM,
        HALF=next_power_of_2(dim // 2),
        SMALL=pool.dtype == torch.float8_e4m3fn,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
