"""Kernels that treat each row alone, against plain torch."""

import plain
import pytest
import torch
from gpu_cases import PagedBatch, Shape


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 96), (3, 1000)])
def test_add_norm(place, rows, width):
    from baton.worker.cuda.kernels.add_norm import NormWeights, add_norm

    residual, added, weight = place.random(rows, width), place.random(rows, width), place.random(width)
    wanted_residual, wanted = plain.add_norm(residual.clone(), added, weight, 1e-5)
    out = place.poisoned(rows, width)
    add_norm(residual, added, NormWeights(weight), 1e-5, out)
    place.check(out, wanted)
    place.check(residual, wanted_residual)


def test_norm_without_addition_leaves_the_residual(place):
    from baton.worker.cuda.kernels.add_norm import NormWeights, add_norm

    residual, weight, out = place.random(4, 80), place.random(80), place.poisoned(4, 80)
    before = residual.clone()
    add_norm(residual, None, NormWeights(weight), 1e-6, out)
    place.check(out, plain.norm(before, weight, 1e-6))
    assert torch.equal(residual, before)


def test_norm_of_picked_rows(place):
    from baton.worker.cuda.kernels.add_norm import NormWeights, add_norm

    residual, added, weight, out = place.random(7, 64), place.random(7, 64), place.random(64), place.poisoned(3, 64)
    before = residual.clone()
    _, wanted = plain.add_norm(residual.clone(), added, weight, 1e-6)
    add_norm(residual, added, NormWeights(weight), 1e-6, out, place.ints([6, 0, 3]))
    place.check(out, wanted[[6, 0, 3]])
    assert torch.equal(residual, before)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_what_is_added_has_a_norm_of_its_own(place, centred, bias):
    from baton.worker.cuda.kernels.add_norm import NormWeights, add_norm

    residual, added, out = place.random(4, 80), place.random(4, 80, scale=5.0) + 1.0, place.poisoned(4, 80)
    norms = [NormWeights(place.random(80), place.random(80) if bias else None, centred) for _ in range(2)]

    def wanted(x, norm):
        x = x.double() - x.double().mean(-1, keepdim=True) if centred else x.double()
        x = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
        return x if norm.bias is None else x + norm.bias.double()

    before = residual.clone()
    sums = before.double() + wanted(added, norms[0])
    add_norm(residual, added, norms[1], 1e-5, out, post=norms[0])
    place.check(residual, sums, 2.0)
    place.check(out, wanted(sums, norms[1]), 2.0)
    add_norm(before, added, None, 1e-5, before, post=norms[0])
    assert torch.equal(before, residual), "without the second norm the same is added"


@pytest.mark.parametrize(("rows", "width"), [(1, 96), (3, 1500)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_gated_mul(place, rows, width, activation):
    from baton.models.layers.mlp import gated
    from baton.worker.cuda.kernels.gated import gated_mul

    gate_up, out = place.random(rows, 2 * width, scale=4.0), place.poisoned(rows, width)
    gated_mul(gate_up, out, activation)
    place.check(out, gated(*gate_up.double().chunk(2, -1), activation))
    gate_up[0, 7] = float("nan")
    gated_mul(gate_up, out, activation)
    assert out[0].isnan().nonzero().tolist() == [[7]]


def test_norms_across_heads(place):
    from baton.worker.cuda.kernels.head_rows import norm_head_rows

    qkv, norms = place.random(3, 96 + 2 * 40), (place.random(96), place.random(40))
    wanted = torch.cat([plain.norm(qkv[:, :96], norms[0], 1e-5), plain.norm(qkv[:, 96:136], norms[1], 1e-5), qkv[:, 136:]], 1)
    norm_head_rows(qkv, norms, 1e-5)
    place.check(qkv, wanted)


@pytest.mark.parametrize("add", [False, True])
def test_a_shared_expert_s_gate(place, add):
    from baton.worker.cuda.kernels.gate_rows import add_gated

    x, gate, shared, out = place.random(3, 70), place.random(1, 70, scale=0.2), place.random(3, 70), place.random(3, 70)
    wanted = (x.double() @ gate.double().t()).sigmoid() * shared.double() + (out.double() if add else 0.0)
    add_gated(x, gate, shared, out, add=add)
    place.check(out, wanted)


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


@pytest.mark.parametrize(("added", "centred"), [(False, False), (True, False), (True, True)])
def test_pooled_rows(place, added, centred):
    """Sums of normed rows in steps of 2^-24, of some ranges; a width that is no multiple of a tile."""
    from baton.worker.cuda.kernels.add_norm import NormWeights
    from baton.worker.cuda.kernels.pool_rows import pool_rows

    x, more, weight = place.random(70, 200), place.random(70, 200) if added else None, place.random(200)
    bias = place.random(200, scale=0.1) if centred else None
    states = plain.add_norm(x, more, weight, 1e-5)[0].double()
    states = states - states.mean(-1, keepdim=True) if centred else states
    states = states * (states.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    states = states if bias is None else states + bias.double()
    ranges, sums = [(0, 1), (3, 66), (69, 1)], torch.full((3, 200), -7, dtype=torch.int64, device=place.device)
    scales = place.poisoned(2, 80, dtype=torch.float32)
    norm = NormWeights(weight, bias, centred)
    pool_rows(x, more, norm, 1e-5, place.ints(ranges), scales, sums, steps_per_one=2.0**24, largest=2.0)
    for (first, count), found in zip(ranges, sums, strict=True):
        wanted = states[first : first + count].clamp(-2.0, 2.0).sum(0)
        assert ((found.double() / 2**24 - wanted).norm() / wanted.norm()).item() < 1e-5
