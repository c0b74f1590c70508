"""A mixture of experts by kernels against the plain one (models/layers/experts.py), and a whole model against transformers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")

sys.path.append(str(Path(__file__).parent.parent / "models"))

import torch.nn.functional as F  # noqa: E402

from baton.models.config import Experts  # noqa: E402
from baton.models.layers.experts import pick_experts  # noqa: E402

HIDDEN, SLOTS = 40, 6
SIGMOID = {"normalised": True, "scoring": "sigmoid", "correction": True, "scale": 1.5}


def plain(x, experts, router, gate_up, down):
    """In float64, from what the router says in float32."""
    picked, shares = pick_experts(F.linear(x.float(), router.weight.float()), experts, router.correction)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in picked.unique().tolist():
        rows, places = torch.where(picked == expert)
        gate, up = F.linear(x[rows].double(), gate_up[expert].double()).chunk(2, -1)
        answer = F.linear(F.silu(gate) * up, down[expert].double())
        out.index_add_(0, rows, answer * shares[rows, places, None].double())
    return out


def in_8_bits(matrices, kind):
    """[experts, outputs, inputs] as LinearWeights in fp8; and what they stand for. kind: what has a scale."""
    from fp8_files import in_blocks, meant

    from baton.worker.cuda.kernels.fp8 import can_stack, quantise, scales_of_blocks
    from baton.worker.cuda.weights import LinearWeights

    count, outputs, inputs = matrices.shape
    if kind == "outputs":
        packed, scales = quantise(matrices.view(-1, inputs))
        true = packed.float() * scales.outputs[:, None]
    else:
        parts = [in_blocks(part) for matrix in matrices.float() for part in matrix.split(outputs // kind)]
        sizes = [len(part) for part, _ in parts]
        assert can_stack(sizes, inputs)
        packed = torch.cat([part.view(torch.uint8) for part, _ in parts]).view(torch.float8_e4m3fn)
        scales = scales_of_blocks([each for _, each in parts], sizes, inputs)
        true = torch.cat([meant(*part) for part in parts])
    return LinearWeights(packed, None, scales).of_experts(count), true.view(matrices.shape)


def make_steps(place, experts, rows, hidden, *, deterministic=False):
    """Poisoned ones, a layer, and a row of activations for each of theirs."""
    from baton.worker.cuda.experts import ExpertSteps
    from baton.worker.cuda.kernels.add_norm import NormWeights
    from baton.worker.cuda.weights import CudaLayerWeights, LinearWeights, RouterWeights

    x = place.random(rows, hidden)
    router = place.random(experts.count, hidden, scale=2 * hidden**-0.5)
    gate_up = place.random(experts.count, 2 * experts.inner_size, hidden, scale=hidden**-0.5)
    down = place.random(experts.count, hidden, experts.inner_size, scale=experts.inner_size**-0.5)
    nothing = LinearWeights(x, None)
    correction = place.random(experts.count, scale=0.1, dtype=torch.float32) if experts.correction else None
    layer = CudaLayerWeights(
        attention_norm=None,
        qkv=nothing,
        head_norms=None,
        output=nothing,
        mlp_norm=NormWeights(place.random(hidden) + 1.0),
        gate_up=LinearWeights(gate_up, None),
        down=LinearWeights(down, None),
        router=RouterWeights(router, correction=correction),
    )
    steps = ExpertSteps(experts, rows, hidden, place.dtype, torch.device(place.device), deterministic=deterministic)
    steps._answers.fill_(float("nan"))
    steps._activated.fill_(float("nan"))
    return steps, layer, x


def mixture(place, experts, rows, *, padding=0, deterministic=False, hidden=HIDDEN, fp8=None):
    """What the kernels make of random rows, twice; and what is right. fp8: what has a scale, where the experts have 8 bits."""
    steps, layer, x = make_steps(place, experts, rows + padding, hidden, deterministic=deterministic)
    true = layer.gate_up.weight, layer.down.weight
    if fp8:
        # Experts, and blocks of them, of very different sizes: a scale of another one would show.
        for weight in true:
            weight *= torch.logspace(0, 1, experts.count, device=weight.device).to(weight.dtype)[:, None, None]
            weight[:, :, -64:] *= 8.0
        gate_up, of_first = in_8_bits(true[0], 2 if fp8 == "blocks" else fp8)
        down, of_second = in_8_bits(true[1], 1 if fp8 == "blocks" else fp8)
        layer, true = replace(layer, gate_up=gate_up, down=down), (of_first, of_second)
    slots = place.ints([*range(rows), *[-1] * padding])

    def product(x, weight, out):
        out.copy_(x.float() @ weight.float().t())

    found = []
    for add in (False, True):  # the second time what is counted must be back at zero
        out = place.random(rows + padding, hidden)
        before = out.clone() if add else torch.zeros_like(out)
        steps.run(steps.route(x, slots, layer.router, product), layer, out, add=add)
        found.append((out.double() - before.double())[:rows])
        assert (out[rows:] == before[rows:]).all(), "padding gets nothing"
    return found, plain(x[:rows], experts, layer.router, *true)


@pytest.mark.parametrize(
    ("experts", "rows", "padding"),
    [
        (Experts(count=8, per_token=2, inner_size=24, normalised=True), 5, 3),
        (Experts(count=6, per_token=6, inner_size=70, normalised=False), 1, 0),
        (Experts(count=5, per_token=1, inner_size=16, normalised=False), 40, 0),
        (Experts(count=9, per_token=3, inner_size=16, **SIGMOID), 12, 2),
        (Experts(count=9, per_token=3, inner_size=16, normalised=True, correction=True), 3, 0),
        pytest.param(Experts(count=4, per_token=2, inner_size=32, normalised=True), 70, 10, marks=pytest.mark.slow),
        pytest.param(Experts(count=128, per_token=8, inner_size=32, normalised=True), 33, 7, marks=pytest.mark.slow),
        pytest.param(Experts(count=3, per_token=3, inner_size=32, normalised=True), 150, 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_get_the_answers_of_their_experts(place, experts, rows, padding):
    found, wanted = mixture(place, experts, rows, padding=padding)
    for out in found:
        place.check(out, wanted, 3.0)


@pytest.mark.parametrize("fp8", ["outputs", "blocks"])
@pytest.mark.parametrize(
    ("rows", "deterministic"),
    [(3, False), *(pytest.param(rows, rows == 30, marks=pytest.mark.slow) for rows in (30, 40, 100, 200))],
)
def test_experts_in_8_bits(place, rows, deterministic, fp8):
    experts = Experts(count=3, per_token=2, inner_size=192, normalised=True)
    found, wanted = mixture(place, experts, rows, hidden=320, padding=2, deterministic=deterministic, fp8=fp8)
    for out in found:
        place.check(out, wanted, 3.0)


@pytest.mark.parametrize("fp8", ["outputs", "blocks"])
def test_many_rows_in_8_bits_too(place, fp8):
    """Against the same rounded numbers: only sums differ."""
    from baton.worker.cuda.kernels.fp8_rows import Rows8Bits
    from baton.worker.cuda.kernels.grouped_gemm_fp8 import grouped_gemm_fp8
    from baton.worker.cuda.kernels.route import Picking, RouteScratch, route

    rows, hidden, inner, tile = 50, 320, 192, 64
    experts = Experts(count=3, per_token=2, inner_size=inner, normalised=True)
    scratch, logits = RouteScratch(rows, 4, 2, (16, 128), place.device), place.random(rows, 3, dtype=torch.float32)
    tiles = route(logits, place.ints(range(rows)), scratch, tile, Picking(experts))
    picked, shares = pick_experts(logits, experts)
    for first, inputs, outputs in ((True, hidden, 2 * inner), (False, inner, hidden)):
        weights = place.random(3, outputs, inputs, scale=inputs**-0.5)
        weights *= torch.logspace(0, 1, 3, device=weights.device).to(weights.dtype)[:, None, None]
        packed, true = in_8_bits(weights, (2 if first else 1) if fp8 == "blocks" else fp8)
        x = place.random(rows if first else rows * 2, inputs)
        x[:, :128] *= 1e2
        small, of_rows = Rows8Bits(rows * 2, hidden, torch.device(place.device)).rounded(x, packed.scales)
        out = place.poisoned(rows * 2, outputs // 2 if first else outputs)
        grouped_gemm_fp8(small, of_rows, packed.weight, packed.scales, out, scratch, tiles, tile, first=first)
        meant = small.double() * of_rows.double().t().repeat_interleave(128 if fp8 == "blocks" else inputs, 1)[:, :inputs]
        meant = meant.repeat_interleave(2, 0) if first else meant[: 2 * rows]
        sums = torch.einsum("pi,poi->po", meant[: 2 * rows], true[picked.reshape(-1)].double())
        gate, up = sums.chunk(2, -1)
        # Tensor cores add up products of 8 bits in fewer bits than float32 has.
        times = 100.0 if place.device == "cuda" and place.dtype == torch.float32 else 3.0
        place.check(out, F.silu(gate) * up if first else sums * shares.reshape(-1, 1).double(), times)


@pytest.mark.parametrize("rule", [{"normalised": True}, {"normalised": False}, SIGMOID], ids=str)
def test_one_row(place, rule):
    """Norm, router and choice in one kernel."""
    import plain as plain_ops

    experts = Experts(count=10, per_token=3, inner_size=24, **rule)
    steps, layer, _ = make_steps(place, experts, 1, HIDDEN)
    for _ in range(2):
        residual = place.random(1, HIDDEN)
        before, normed = residual.clone(), place.poisoned(1, HIDDEN)
        x = plain_ops.norm(residual, layer.mlp_norm.weight, 1e-5)
        routed = steps.route_row(residual, layer.mlp_norm, 1e-5, layer.router, normed)
        steps.run(routed, layer, residual, add=True)
        wanted = before.double() + plain(x, experts, layer.router, layer.gate_up.weight, layer.down.weight)
        place.check(normed, x, 2.0)
        place.check(residual, wanted, 3.0)


@pytest.mark.slow
def test_fixed_tiles_give_the_same(place):
    found, wanted = mixture(place, Experts(count=4, per_token=2, inner_size=32, normalised=True), 90, deterministic=True)
    place.check(found[0], wanted, 3.0)


def test_tiles_and_members(place):
    """Every pair is in a tile of its expert, once; tiles are no more than there is room for."""
    from baton.worker.cuda.kernels.route import Picking, RouteScratch, route

    rows, experts, per_token, tile = 90, 16, 3, 16
    logits = place.random(rows, experts, dtype=torch.float32)
    logits[:, 3] += 5.0  # popular
    logits[:, 7] = -50.0  # never picked
    scratch = RouteScratch(rows, experts, per_token, (16, 128), place.device)
    mixture = Experts(count=experts, per_token=per_token, inner_size=1, normalised=True)
    count = route(logits, place.ints(range(rows)), scratch, tile, Picking(mixture))
    picked, tiles = scratch.picked.cpu().numpy(), scratch.tiles.cpu().numpy()[:count]
    members, seen = scratch.members.cpu().numpy(), []
    for number, (expert, filled) in enumerate(tiles):
        pairs = members[number * tile : number * tile + filled]
        assert (picked.reshape(-1)[pairs] == expert).all()
        seen += pairs.tolist()
    assert sorted(seen) == list(range(rows * per_token))
    wanted, shares = pick_experts(logits, mixture)
    assert np.array_equal(picked, wanted.cpu().numpy())
    assert torch.allclose(scratch.shares, shares, atol=1e-6)
    assert scratch.counts[[7, 3]].tolist() == [0, rows]


@pytest.mark.parametrize("rule", [{"normalised": True}, {"normalised": True, "scoring": "sigmoid"}], ids=str)
def test_a_row_that_is_not_a_number_spoils_no_other(place, rule):
    from baton.worker.cuda.kernels.route import Picking, RouteScratch, route

    logits = place.random(3, 16, dtype=torch.float32)
    logits[1] = float("nan")
    scratch = RouteScratch(3, 16, 4, (16, 128), place.device)
    route(logits, place.ints(range(3)), scratch, 16, Picking(Experts(count=16, per_token=4, inner_size=1, **rule)))
    picked = scratch.picked.cpu().numpy()
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 16 for row in picked.tolist())
    assert torch.isfinite(scratch.shares[[0, 2]]).all()
