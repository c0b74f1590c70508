"""Attention with keys and values of 8 bits is right at every score, on every variant. selftest.c says so of ARM and of tiles.

The likeliest token's weight was rounded to a third digit where scores were large, and answers then had the wrong sign.
"""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch
from attention_cases import History, KernelAttention, Shape
from kernels import Team
from test_attention import in_bytes, in_mixed_bytes

from baton.native.library import Library
from baton.worker.attention.gathered import GatheredAttention

SCORES = pytest.mark.parametrize("score", [300.0, 900.0, 1100.0, 4000.0, 1e5, 1e8])
"""To base 2, of the largest."""
TOKENS = 90
SHAPE = Shape(heads=4, kv_heads=2, head_dim=64, dtype="int8", format="int8-fours")


def kernel_and_float32(library: Library, history: History) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's answers, and what float32 makes of the same bytes."""
    exact = History(replace(history.shape, dtype="float32", format="turned"), history.lengths)
    exact.q, exact.k = ([in_mixed_bytes(x) for x in every] for every in (history.q, history.k))
    exact.v = [in_bytes(x) for x in history.v]
    config, parts = history.shape.config(), history.all_at_once()
    with Team(library, 2) as team:
        ours = history.run(KernelAttention(team, config, history.pool()), parts, 0)
    return torch.cat(ours), torch.cat(exact.run(GatheredAttention(config, exact.pool()), parts, 0))


def scaled_to(history: History, score: float) -> None:
    """Keys grow until the largest score is this one."""
    group, scale = history.shape.heads // history.shape.kv_heads, history.shape.config().attention_scale
    for q, k in zip(history.q, history.k, strict=True):
        largest = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)).max() * scale
        k *= score * log(2) / largest


@SCORES
def test_the_token_that_gets_everything_gives_its_value(library, score):
    """50 of them, each in a sequence of its own."""
    history = History(SHAPE, [9] * 50)
    for q, k in zip(history.q, history.k, strict=True):
        q[:, 1::2] = q[:, 0::2]  # both heads of a group ask the same
        k[4] = q[8, ::2] * 10.0
    scaled_to(history, score)
    ours, expected = kernel_and_float32(library, history)
    torch.testing.assert_close(ours[8::9], expected[8::9], atol=2e-2, rtol=0)


@SCORES
@pytest.mark.parametrize("seed", range(3))
def test_random_scores_are_those_of_float32(library, score, seed):
    """As near as float32 itself is to the truth: it rounds a score of 100,000 to a hundredth."""
    history = History(SHAPE, [TOKENS, 7], seed)
    scaled_to(history, score)
    ours, expected = kernel_and_float32(library, history)
    assert ours.isfinite().all()
    largest = max(float(v.abs().max()) for v in history.v)
    torch.testing.assert_close(ours, expected, atol=largest * min(2.0, 5e-3 + score * 2.0**-19), rtol=0)


@SCORES
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_that_are_all_alike_give_the_mean(library, score, sign):
    """As large as they may be, and as far below zero."""
    history = History(SHAPE, [TOKENS])
    history.q[0][:] = history.q[0][0, 0]
    history.k[0][:] = history.q[0][0, 0]
    scaled_to(history, score)
    history.k[0] *= sign
    ours, _ = kernel_and_float32(library, history)
    counts = torch.arange(1, TOKENS + 1)[:, None, None]
    means = in_bytes(history.v[0]).cumsum(0) / counts
    torch.testing.assert_close(ours.reshape(TOKENS, 4, 64), means.repeat_interleave(2, 1), atol=2e-3, rtol=0)
