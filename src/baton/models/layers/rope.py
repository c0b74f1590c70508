"""Rotary positions: dimension i of a head and dimension i + head_dim/2 turn together, by position * frequency(i).

`Rope.angles` is asked once a step, `rotate` once a layer. There is no table of all positions: working out the angles of
a step is a rounding error of its cost, and a table for a long context is tens of megabytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from baton.models.config import FrequencyDivisors, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


class Angles(NamedTuple):
    """Of one step's tokens, each [tokens, 1, head_dim]; the middle dimension spreads over the heads."""

    cos: Tensor
    signed_sin: Tensor
    "-sin in the first half, +sin in the second: what the swapped halves are multiplied by."


class Rope:
    __slots__ = ("attention_factor", "frequencies")

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> None:
        frequencies, self.attention_factor = rotary_frequencies(config, head_dim)
        self.frequencies = frequencies.to(device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """positions: [tokens]. Worked out in float32, whatever the model computes in."""
        turns = positions.to(torch.float32)[:, None, None] * self.frequencies
        cos = turns.cos().mul_(self.attention_factor)
        sin = turns.sin().mul_(self.attention_factor)
        return Angles(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """heads: [tokens, any number of heads, head_dim]. Rolling by half the width swaps the two halves."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return (heads * angles.cos).addcmul_(swapped, angles.signed_sin)


def rotary_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians a position for each pair of dimensions, float32 [head_dim / 2], and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (config.theta**exponents)
    match config.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor=factor):
            return plain / factor, 1.0
        case FrequencyDivisors(divisors=divisors):
            return plain / torch.tensor(divisors, dtype=torch.float32), 1.0
        case Llama3Scaling() as llama3:
            return _llama3(plain, llama3), 1.0
        case YarnScaling() as yarn:
            return _yarn(plain, yarn, config.theta), yarn.attention_factor


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    # wavelength   |-- kept --|-- blended --|-- divided by factor --|
    #              0   original/high   original/low
    turns_in_original = scaling.original_context * plain / (2 * math.pi)
    kept = (turns_in_original - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * (plain / scaling.factor)


def _yarn(plain: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    # pair index   |-- kept --|-- ramp --|-- divided by factor --|
    #              0         low        high                 head_dim/2
    head_dim = 2 * plain.shape[0]

    def pair_that_turns(times: float) -> float:
        """Which pair turns so many times within the original context."""
        return head_dim * math.log(scaling.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    divided = (torch.arange(plain.shape[0], dtype=torch.float32) - low) / max(high - low, 0.001)
    divided = divided.clamp(0.0, 1.0)
    return plain * (1.0 - divided) + (plain / scaling.factor) * divided
