"""Rotary frequencies: how far each pair of dimensions turns from one position to the next."""

from __future__ import annotations

import math

import numpy as np

from baton.models.config import FrequencyDivisors, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from baton.models.raw_tensor import Floats


def rotary_frequencies(config: RopeConfig, head_dim: int) -> tuple[Floats, float]:
    """Radians a position for each pair of dimensions, float32 [head_dim / 2], and the factor on cos and sin."""
    exponents: Floats = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power in double: numpy's float32 one is off by a bit here and there, and turns add up over a long context.
    plain: Floats = np.float32(1.0) / np.power(config.theta, exponents.astype(np.float64)).astype(np.float32)
    match config.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor=factor):
            return plain / factor, 1.0
        case FrequencyDivisors(divisors=divisors):
            return np.divide(plain, np.array(divisors, np.float32)), 1.0
        case Llama3Scaling() as llama3:
            return _llama3(plain, llama3), 1.0
        case YarnScaling() as yarn:
            return _yarn(plain, yarn, config.theta), yarn.attention_factor


def _llama3(plain: Floats, scaling: Llama3Scaling) -> Floats:
    # wavelength   |-- kept --|-- blended --|-- divided by factor --|
    #              0   original/high   original/low
    turns_in_original = scaling.original_context * plain / (2 * math.pi)
    kept = (turns_in_original - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clip(0.0, 1.0)
    return kept * plain + (1.0 - kept) * (plain / scaling.factor)


def _yarn(plain: Floats, scaling: YarnScaling, theta: float) -> Floats:
    # pair index   |-- kept --|-- ramp --|-- divided by factor --|
    #              0         low        high                 head_dim/2
    head_dim = 2 * plain.size

    def pair_that_turns(times: float) -> float:
        """Which pair turns so many times within the original context."""
        return head_dim * math.log(scaling.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp: Floats = np.arange(plain.size, dtype=np.float32)
    ramp -= low
    ramp /= max(high - low, 0.001)
    divided: Floats = ramp.clip(0.0, 1.0)
    blended: Floats = plain * (1.0 - divided) + (plain / scaling.factor) * divided
    return blended
