"""Rounding as bench/rounding.py tries it is rounding as the kernels do it."""

import pytest
import torch

rounding = pytest.importorskip("rounding", reason="needs torch")


@pytest.mark.parametrize("width", [32, 96, 160, 576, 1536, 544])
def test_mixing_is_a_rotation(width):
    a, b = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(rounding.mixed(a) @ rounding.mixed(b).T, a @ b.T)


@pytest.mark.parametrize("width", [96, 576, 1536])
def test_mixing_spreads_a_number_over_the_row(width):
    x = torch.zeros(1, width)
    x[0, 7] = 100.0
    assert 0 < rounding.mixed(x).abs().amax() < 400 / width**0.5


def test_rows_and_groups_have_a_scale_of_their_own():
    x = torch.tensor([[1.0, 0.004] * 16 + [1000.0, 4.1] * 16])
    assert rounding.in_groups(x)[0, :2].tolist() == pytest.approx([1.0, 1 / 127])
    assert rounding.to_bytes(x)[0, :2].tolist() == [0.0, 0.0]
