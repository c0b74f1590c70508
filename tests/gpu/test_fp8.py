"""Weights and KV cache in 8 bits: kernels against the same numbers in plain torch, and what rounding costs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")

from gpu_cases import PagedBatch, Shape  # noqa: E402

from baton.errors import InvalidConfig  # noqa: E402


def packed(place, outputs, inputs):
    """Quantised random weights, their scales, and what they stand for."""
    from baton.worker.cuda.kernels.fp8 import quantise

    weight = place.random(outputs, inputs, scale=inputs**-0.5)
    weight[:100] *= 30.0  # outputs of other sizes
    small, scales = quantise(weight)
    meant = small.float() * scales.outputs[:, None]
    error = ((meant - weight.float()).norm() / weight.float().norm()).item()
    assert 0.01 < error < 0.04, "three bits behind the point"
    return small, scales, meant


def test_unpacked(place):
    from baton.worker.cuda.kernels.fp8 import unpack

    small, scales, meant = packed(place, 256, 384)
    out = place.poisoned(256, 384)
    unpack(small, scales, out)
    place.check(out, meant)


@pytest.mark.parametrize("paired", [False, True])
def test_one_row(place, paired):
    import plain

    from baton.worker.cuda.kernels.gemv import gemv

    small, scales, meant = packed(place, 512, 256)
    x, norm = place.random(1, 256), place.random(256)
    wanted = plain.norm(x.double(), norm, 1e-5).float() @ meant.t()
    wanted = plain.silu_mul(wanted) if paired else wanted
    out = place.poisoned(*wanted.shape)
    gemv(x, small, out, scales=scales, norm=norm, eps=1e-5, paired=paired)
    place.check(out, wanted)


@pytest.mark.parametrize("rows", [2, 33, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("paired", [False, True])
def test_few_rows(place, rows, paired):
    import plain

    from baton.worker.cuda.kernels.skinny_gemm import FP8_ROWS_MAX, SkinnyScratch, skinny_gemm

    small, scales, meant = packed(place, 256, 1024)
    x = place.random(rows, 1024)
    wanted = x.float() @ meant.t()
    wanted = plain.silu_mul(wanted) if paired else wanted
    out = place.poisoned(*wanted.shape)
    skinny_gemm(x, small, out, SkinnyScratch(256, place.device, FP8_ROWS_MAX), scales=scales, paired=paired)
    place.check(out, wanted, 2.0)


def test_keys_and_values_in_8_bits(place):
    """Decode and prefill read what was stored, and nothing else is lost."""
    import plain
    from test_attention_kernels import decode

    from baton.worker.cuda.kernels.rope_store import rope_store

    shape = Shape()
    batch = PagedBatch(place, shape, contexts=[40, 3], counts=[1, 1])
    whole = batch.pool.clone()
    batch.pool = torch.nan_to_num(batch.pool.float(), nan=1.0).to(torch.float8_e4m3fn)
    out, wanted = decode(batch, shape)
    place.check(out, wanted, 2.0)
    pool, angles = batch.pool.clone(), batch.angles()
    qkv = batch.qkv.clone()
    qkv[:, -1] = 1e4  # beyond the largest number
    rope_store(qkv, None, 0.0, angles, batch.positions, batch.row_slots, batch.tables, pool, 0, heads=shape.heads)
    plain.rope_store(batch.qkv, None, 0.0, angles, batch.positions, batch.row_slots, batch.tables, whole, 0, heads=shape.heads)
    for row, (position, slot) in enumerate(zip(batch.positions_np, batch.row_slots_np, strict=True)):
        block, at = int(batch.tables_np[slot, position // 16]), int(position % 16)
        stored, meant = pool[block, 0, :, :, at].float(), whole[block, 0, :, :, at].float()
        assert stored[1, -1, -1] == 448.0, row
        stored[1, -1, -1] = meant[1, -1, -1] = 0.0
        assert ((stored - meant).norm() / meant.norm()).item() < 0.04


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_is_none_in_8_bits_too(place, value):
    """Found by a review: it was stored as 448, and the row went on with that."""
    from baton.worker.cuda.kernels.rope_store import rope_store

    shape = Shape()
    batch = PagedBatch(place, shape, contexts=[40, 3], counts=[1, 1])
    pool, qkv = torch.zeros_like(batch.pool).to(torch.float8_e4m3fn), batch.qkv.clone()
    qkv[1, -1] = value  # a value's; keys and queries are as they should be
    rope_store(qkv, None, 0.0, batch.angles(), batch.positions, batch.row_slots, batch.tables, pool, 0, heads=shape.heads)
    stored = []
    for position, slot in zip(batch.positions_np, batch.row_slots_np, strict=True):
        block, at = int(batch.tables_np[slot, position // 16]), int(position % 16)
        stored.append(pool[block, 0, :, :, at].float())
    assert torch.isfinite(stored[0]).all()
    assert torch.isnan(stored[1][1, -1, -1])
    assert torch.isfinite(stored[1]).sum() == stored[1].numel() - 1


def test_what_cannot_be_in_8_bits():
    from dataclasses import replace

    from baton.models.shapes import SHAPES
    from baton.worker.cuda.weights import refuse_fp8

    refuse_fp8(SHAPES["llama-3-8b"])
    refuse_fp8(SHAPES["qwen3-30b-a3b"])
    with pytest.raises(InvalidConfig, match="multiples of 16"):
        refuse_fp8(replace(SHAPES["llama-3-8b"], intermediate_size=1000))


def test_rows_in_8_bits(place):
    from baton.worker.cuda.kernels.fp8 import FP8
    from baton.worker.cuda.kernels.fp8_rows import quantise_rows

    x = place.random(5, 200)
    x[1] *= 1e3
    x[2] = 0.0
    packed, scales = torch.zeros(5, 200, dtype=FP8, device=place.device), place.poisoned(1, 5, dtype=torch.float32)
    quantise_rows(x, packed, scales)
    meant = packed.float() * scales[0, :, None]
    assert torch.equal(meant[2], torch.zeros_like(meant[2]))
    for row in (0, 1, 3, 4):
        # Triton's interpreter loses what is carried into the exponent.
        error = ((meant[row] - x[row].float()).norm() / x[row].float().norm()).item()
        assert error < (0.04 if place.device == "cuda" else 0.2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [33, 64, 200, 1000])
def test_products_of_8_bits_with_8_bits(gpu, rows, bias):
    """Against the same rounded numbers: only sums differ."""
    from gpu_cases import Place

    from baton.worker.cuda.kernels.fp8 import FP8
    from baton.worker.cuda.kernels.fp8_rows import Rows8Bits, quantise_rows

    place = Place("cuda", torch.bfloat16)
    small, scales, meant = packed(place, 512, 384)
    x, more = place.random(rows, 384), place.random(512) if bias else None
    out = place.poisoned(rows, 512)
    Rows8Bits(1024, 512, gpu).product(x, small, scales, out, more)
    rounded, of_rows = torch.zeros(rows, 384, dtype=FP8, device=gpu), torch.zeros(1, rows, device=gpu)
    quantise_rows(x, rounded, of_rows)
    wanted = (rounded.double() * of_rows[0, :, None].double()) @ meant.double().t()
    place.check(out, wanted + more.double() if bias else wanted, 2.0)
