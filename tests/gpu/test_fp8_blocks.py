"""Weights in fp8 with scales of blocks, as checkpoints bring them: kernels against the same numbers in float32."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")
pytest.importorskip("safetensors", reason="writes checkpoints")
sys.path.append(str(Path(__file__).parent.parent / "models"))

from fp8_files import in_blocks, meant  # noqa: E402

# The last block of a matrix may be smaller than the others: inputs, and outputs of each matrix of a stack.
SIZES = [([192], 320), ([256], 256), ([192, 64, 100], 144)]


def packed(place, sizes, inputs):
    """Matrices one above the other in fp8, the scales of all, and what they stand for."""
    from baton.worker.cuda.kernels.fp8 import can_stack, scales_of_blocks

    assert can_stack(sizes, inputs)
    parts = []
    for size in sizes:
        weight = place.random(size, inputs, scale=inputs**-0.5, dtype=torch.float32)
        weight[:, -64:] *= 30.0  # blocks of other sizes
        weight[:50] *= 0.1
        parts.append(in_blocks(weight))
    small = torch.cat([matrix.view(torch.uint8) for matrix, _ in parts]).view(torch.float8_e4m3fn)
    scales = scales_of_blocks([scales for _, scales in parts], sizes, inputs)
    assert scales.blocks is not None
    assert float(scales.blocks.max()) <= 1.0
    return small, scales, torch.cat([meant(*part) for part in parts])


def test_which_matrices_can_be_one():
    from baton.worker.cuda.kernels.fp8 import can_stack

    assert can_stack([192, 64, 100], 144)
    assert not can_stack([96, 96], 144), "a group of outputs would be of two matrices"
    assert not can_stack([128], 100), "rows would not begin at whole words"


@pytest.mark.parametrize(("sizes", "inputs"), SIZES)
def test_unpacked(place, sizes, inputs):
    from baton.worker.cuda.kernels.fp8 import unpack

    small, scales, wanted = packed(place, sizes, inputs)
    out = place.poisoned(*wanted.shape)
    unpack(small, scales, out)
    place.check(out, wanted)


@pytest.mark.parametrize(("outputs", "inputs"), [(192, 320), (100, 42), (256, 128)])
def test_unpacked_as_stored(place, outputs, inputs):
    from baton.worker.cuda.kernels.fp8 import unpack_blocks

    small, scales = in_blocks(place.random(outputs, inputs, dtype=torch.float32))
    out = place.poisoned(outputs, inputs)
    unpack_blocks(small, scales, out)
    assert torch.equal(out, meant(small, scales).to(out.dtype)), "rounded once"


@pytest.mark.parametrize(("sizes", "inputs"), SIZES)
def test_one_row(place, sizes, inputs):
    from baton.worker.cuda.kernels.gemv import gemv

    small, scales, weight = packed(place, sizes, inputs)
    x, bias, residual = place.random(1, inputs), place.random(sum(sizes)), place.random(1, sum(sizes))
    out = place.poisoned(1, sum(sizes))
    gemv(x, small, out, scales=scales, bias=bias, residual=residual)
    place.check(out, x.float() @ weight.t() + bias.float() + residual.float())


def test_one_row_through_norm_and_pair(place):
    import plain

    from baton.worker.cuda.kernels.gemv import gemv

    small, scales, weight = packed(place, [192, 192], 320)
    x, norm, bias = place.random(1, 320), place.random(320), place.random(384)
    out = place.poisoned(1, 192)
    gemv(x, small, out, scales=scales, norm=norm, eps=1e-5, bias=bias, paired=True)
    place.check(out, plain.silu_mul(plain.norm(x.double(), norm, 1e-5).float() @ weight.t() + bias.float()))


@pytest.mark.parametrize("rows", [2, pytest.param(33, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("sizes", "inputs"), [*SIZES, ([192], 1100 - 1100 % 16)])
def test_few_rows(place, sizes, inputs, rows):
    from baton.worker.cuda.kernels.skinny_gemm import FP8_ROWS_MAX, SkinnyScratch, skinny_gemm

    small, scales, weight = packed(place, sizes, inputs)
    x, residual = place.random(rows, inputs), place.random(rows, sum(sizes))
    out = place.poisoned(rows, sum(sizes))
    skinny_gemm(x, small, out, SkinnyScratch(sum(sizes), place.device, FP8_ROWS_MAX), scales=scales, residual=residual)
    place.check(out, x.float() @ weight.t() + residual.float(), 2.0)


@pytest.mark.parametrize("rows", [2, pytest.param(33, marks=pytest.mark.slow)])
def test_few_rows_of_pairs(place, rows):
    import plain

    from baton.worker.cuda.kernels.skinny_gemm import FP8_ROWS_MAX, SkinnyScratch, skinny_gemm

    small, scales, weight = packed(place, [192, 192], 320)
    x = place.random(rows, 320)
    out = place.poisoned(rows, 192)
    skinny_gemm(x, small, out, SkinnyScratch(384, place.device, FP8_ROWS_MAX), scales=scales, paired=True)
    place.check(out, plain.silu_mul(x.float() @ weight.t()), 2.0)


def test_rows_in_8_bits_with_a_scale_for_128_inputs(place):
    from baton.worker.cuda.kernels.fp8 import FP8
    from baton.worker.cuda.kernels.fp8_rows import quantise_rows

    x = place.random(5, 320)
    x[:, :128] *= 1e3
    small, scales = torch.zeros(5, 320, dtype=FP8, device=place.device), place.poisoned(3, 5, dtype=torch.float32)
    quantise_rows(x, small, scales, 128)
    found = small.float() * scales.t().repeat_interleave(128, 1)[:, :320]
    for part in (slice(0, 128), slice(128, 256), slice(256, 320)):
        # Triton's interpreter loses what is carried into the exponent.
        error = ((found - x.float())[:, part].norm() / x.float()[:, part].norm()).item()
        assert error < (0.04 if place.device == "cuda" else 0.2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [33, 64, 200, 1001])
def test_many_rows(gpu, rows, bias):
    """Against the same rounded numbers: only sums differ. Rows behind them are room for cuBLAS."""
    from gpu_cases import Place

    from baton.worker.cuda.kernels.fp8 import FP8
    from baton.worker.cuda.kernels.fp8_rows import Rows8Bits, quantise_rows

    place = Place("cuda", torch.bfloat16)
    small, scales, weight = packed(place, [256, 128, 80], 1024)
    if not Rows8Bits.takes(scales):
        pytest.skip("cuBLAS multiplies blocks on Hopper only")
    x, more = place.random(rows, 1024), place.random(464) if bias else None
    out = place.poisoned(1004, 464)[:rows]
    Rows8Bits(1001, 1024, gpu).product(x, small, scales, out, more)
    rounded, of_rows = torch.zeros(rows, 1024, dtype=FP8, device=gpu), torch.zeros(8, rows, device=gpu)
    quantise_rows(x, rounded, of_rows, 128)
    wanted = (rounded.double() * of_rows.t().repeat_interleave(128, 1).double()) @ weight.double().t()
    place.check(out, wanted + more.double() if bias else wanted, 2.0)


@pytest.mark.parametrize("inputs", [640, 576])
def test_what_the_library_would_get_wrong_it_is_not_given(gpu, inputs):
    from gpu_cases import Place

    from baton.worker.cuda.kernels.fp8_rows import Rows8Bits

    assert not Rows8Bits.takes(packed(Place("cuda", torch.bfloat16), [128], inputs)[1])
