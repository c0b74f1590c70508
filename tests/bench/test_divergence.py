"""The default weights are nearly exact on every kind of kernel that this machine runs (bench/divergence.py)."""

from __future__ import annotations

from statistics import fmean

import pytest

from baton.native.variants import supported_variants
from baton.text.loading import load_model_text
from divergence import Way, measure
from quality import windows_of

BOUND = 1.2
"""Thousandths of a nat for the mean of one window. The goal is 1.0 for 16: docs/internals/quantisation.md."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", supported_variants(), ids=lambda variant: variant.name)
def test_the_default_weights_and_keys_are_nearly_exact(variant, smollm2_path):
    windows = windows_of(load_model_text(str(smollm2_path)).tokenizer.encode, 256, 1)
    way = Way("auto", "auto", variant)
    kl = 1000 * fmean(measure(smollm2_path, [way], windows, 1)[way].kl)
    print(f"{variant.name}: {kl:.2f}")
    assert kl < BOUND
