"""Kernels that treat each row alone, against plain torch."""

import pytest
import torch
from gpu_cases import PagedBatch, Shape

from baton.worker.cuda import plain


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 96), (3, 1000)])
def test_add_norm(place, rows, width):
    from baton.worker.cuda.kernels.add_norm import add_norm

    residual, added, weight = place.random(rows, width), place.random(rows, width), place.random(width)
    wanted_residual, wanted = plain.add_norm(residual.clone(), added, weight, 1e-5)
    out = place.poisoned(rows, width)
    add_norm(residual, added, weight, 1e-5, out)
    place.check(out, wanted)
    place.check(residual, wanted_residual)


def test_norm_without_addition_leaves_the_residual(place):
    from baton.worker.cuda.kernels.add_norm import add_norm

    residual, weight, out = place.random(4, 80), place.random(80), place.poisoned(4, 80)
    before = residual.clone()
    add_norm(residual, None, weight, 1e-6, out)
    place.check(out, plain.norm(before, weight, 1e-6))
    assert torch.equal(residual, before)


def test_norm_of_picked_rows(place):
    from baton.worker.cuda.kernels.add_norm import add_norm

    residual, added, weight, out = place.random(7, 64), place.random(7, 64), place.random(64), place.poisoned(3, 64)
    before = residual.clone()
    _, wanted = plain.add_norm(residual.clone(), added, weight, 1e-6)
    add_norm(residual, added, weight, 1e-6, out, place.ints([6, 0, 3]))
    place.check(out, wanted[[6, 0, 3]])
    assert torch.equal(residual, before)


@pytest.mark.parametrize(("rows", "width"), [(1, 96), (3, 1500)])
def test_silu_mul(place, rows, width):
    from baton.worker.cuda.kernels.silu_mul import silu_mul

    gate_up, out = place.random(rows, 2 * width, scale=3.0), place.poisoned(rows, width)
    silu_mul(gate_up, out)
    place.check(out, plain.silu_mul(gate_up))


def test_embed_takes_the_row_s_token_or_what_its_slot_sampled(place):
    from baton.worker.cuda.kernels.embed import embed

    table, out = place.random(50, 40), place.poisoned(5, 40)
    # Row 3's slot failed: it has no token. Row 4 is padding.
    ids, slots, last = place.ints([7, -1, -1, -1, -1]), place.ints([0, 2, 0, 3, -1]), place.ints([11, 12, 49, -2])
    embed(ids, slots, last, table, out)
    assert torch.equal(out, table[[7, 49, 11, 0, 11]])
    assert torch.equal(out, plain.embed(ids, slots, last, table))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(heads=4, kv_heads=4, dim=16, block_size=32),
        Shape(heads=14, kv_heads=2, dim=64, norm=True),
        Shape(heads=3, kv_heads=1, dim=48, norm=True),
    ],
    ids=["gqa", "mha", "qwen", "odd"],
)
def test_rope_store(place, shape):
    from baton.worker.cuda.kernels.rope_store import rope_store

    batch = PagedBatch(place, shape, contexts=[0, 15, 31, 40], counts=[5, 1, 2, 1])
    norms = (place.random(shape.dim), place.random(shape.dim)) if shape.norm else None
    angles = batch.angles()
    pool, qkv = batch.pool.clone(), batch.qkv.clone()
    q = plain.rope_store(qkv, norms, 1e-6, angles, batch.positions, batch.row_slots, batch.tables, pool, 1, heads=shape.heads)
    rope_store(batch.qkv, norms, 1e-6, angles, batch.positions, batch.row_slots, batch.tables, batch.pool, 1, heads=shape.heads)
    place.check(batch.qkv[:, : shape.heads * shape.dim], q.flatten(1))
    written = ~pool.isnan()
    assert torch.equal(written, ~batch.pool.isnan()), "what was not asked for was written, or the reverse"
    place.check(batch.pool[written], pool[written])


def test_rope_store_leaves_padding_alone(place):
    from baton.worker.cuda.kernels.rope_store import rope_store

    shape = Shape()
    batch = PagedBatch(place, shape, contexts=[3, 4], counts=[1, 1])
    before, qkv = batch.pool.clone(), batch.qkv.clone()
    positions, slots = place.ints([-1, -1]), place.ints([-1, -1])
    rope_store(batch.qkv, None, 1e-6, batch.angles(), positions, slots, batch.tables, batch.pool, 0, heads=shape.heads)
    assert torch.equal(batch.qkv, qkv)
    assert torch.equal(batch.pool.isnan(), before.isnan())


@pytest.mark.parametrize("added", [False, True])
def test_pooled_rows(place, added):
    """Sums of normed rows in steps of 2^-24, of some ranges; a width that is no multiple of a tile."""
    from baton.worker.cuda.kernels.pool_rows import pool_rows

    x, more, weight = place.random(70, 200), place.random(70, 200) if added else None, place.random(200)
    states = plain.add_norm(x, more, weight, 1e-5)[0].double()
    states = states * (states.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    ranges, sums = [(0, 1), (3, 66), (69, 1)], torch.full((3, 200), -7, dtype=torch.int64, device=place.device)
    scales = place.poisoned(80, dtype=torch.float32)
    pool_rows(x, more, weight, 1e-5, place.ints(ranges), scales, sums, steps_per_one=2.0**24, largest=2.0)
    for (first, count), found in zip(ranges, sums, strict=True):
        wanted = states[first : first + count].clamp(-2.0, 2.0).sum(0)
        assert ((found.double() / 2**24 - wanted).norm() / wanted.norm()).item() < 1e-5
