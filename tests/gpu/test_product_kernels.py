"""The products that are not cuBLAS's, against plain torch."""

import plain
import pytest
import torch


def product(x, weight, bias=None):
    out = x.double() @ weight.double().t()
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize(("outputs", "inputs"), [(40, 64), (96, 300), (300, 300)])
def test_gemv(place, outputs, inputs):
    from baton.worker.cuda.kernels.gemv import gemv

    x, weight, bias = place.random(1, inputs), place.random(outputs, inputs, scale=0.1), place.random(outputs)
    out = place.poisoned(1, outputs)
    gemv(x, weight, out)
    place.check(out, product(x, weight))
    gemv(x, weight, out, bias=bias)
    place.check(out, product(x, weight, bias))


def test_gemv_with_norm_and_residual(place):
    from baton.worker.cuda.kernels.gemv import gemv

    x, weight, norm = place.random(1, 200, scale=3.0), place.random(100, 200, scale=0.1), place.random(200)
    residual = place.random(1, 100)
    normed = plain.norm(x.double(), norm, 1e-5)
    wanted = product(normed, weight) + residual.double()
    gemv(x, weight, residual, norm=norm, eps=1e-5, residual=residual)
    place.check(residual, wanted)


@pytest.mark.parametrize("inputs", [64, 90])
def test_gemv_of_gate_and_up(place, inputs):
    from baton.worker.cuda.kernels.gemv import gemv

    x, weight, bias = place.random(1, inputs), place.random(2 * 70, inputs, scale=0.1), place.random(2 * 70)
    out = place.poisoned(1, 70)
    gemv(x, weight, out, bias=bias, paired=True)
    place.check(out, plain.silu_mul(product(x, weight, bias)))


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(2, 100, 600), (7, 200, 2048), (29, 64, 90)])
def test_skinny_gemm(place, rows, outputs, inputs):
    from baton.worker.cuda.kernels.skinny_gemm import SkinnyScratch, skinny_gemm

    x, weight, bias = place.random(rows, inputs), place.random(outputs, inputs, scale=inputs**-0.5), place.random(outputs)
    out, residual, scratch = place.poisoned(rows, outputs), place.random(rows, outputs), SkinnyScratch(outputs, place.device)
    skinny_gemm(x, weight, out, scratch, bias=bias)
    place.check(out, product(x, weight, bias))
    wanted = product(x, weight) + residual.double()
    skinny_gemm(x, weight, residual, scratch, residual=residual)
    place.check(residual, wanted)
    halves = place.poisoned(rows, outputs // 2)
    skinny_gemm(x, weight, halves, scratch, bias=bias, paired=True)
    place.check(halves, plain.silu_mul(product(x, weight, bias)))
    assert not scratch.arrived.any()


@pytest.mark.parametrize(("rows", "inputs"), [(1, 160), (5, 1100), (33, 160), (64, 2048), (150, 160), (270, 1024)])
def test_fixed_gemm(place, rows, inputs):
    from baton.worker.cuda.kernels.fixed_gemm import FixedScratch, fixed_gemm

    x, weight, bias = place.random(rows, inputs), place.random(200, inputs, scale=inputs**-0.5), place.random(200)
    out, scratch = place.poisoned(rows, 200), FixedScratch(200, place.device)
    fixed_gemm(x, weight, out, scratch, bias)
    place.check(out, product(x, weight, bias))
    assert not scratch.arrived.any()


def test_fixed_gemm_gives_a_row_the_same_bits_among_any_number(place):
    from baton.worker.cuda.kernels.fixed_gemm import FixedScratch, fixed_gemm

    if place.device == "cpu":
        pytest.skip("numpy's products, which stand for the tensor cores in the interpreter, promise no order")
    x, weight = place.random(300, 4096), place.random(512, 4096, scale=0.02)
    all_rows, scratch = place.poisoned(300, 512), FixedScratch(512, place.device)
    fixed_gemm(x, weight, all_rows, scratch)
    for rows in (1, 7, 16, 17, 40, 64, 65, 128, 200, 256, 257):
        out = place.poisoned(rows, 512)
        fixed_gemm(x[:rows], weight, out, scratch)
        assert torch.equal(out, all_rows[:rows]), f"{rows} rows"
