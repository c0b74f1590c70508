"""Rotary frequencies: the angle per position of each pair of dimensions; and their cosines and sines.

The numbers must be equal on every host: instances exchange keys that were rotated with them (models/portable_math.py).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from baton.models.config import FrequencyDivisors, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from baton.models.portable_logarithm import logarithm, power
from baton.models.portable_math import ANGLE_MAX, cosines_and_sines
from baton.models.raw_tensor import Floats

CHUNK_NUMBERS = 16384
"""Number of angles per chunk: its dozen float64 arrays fit a core's cache."""


class RotaryTable:
    """Cosines and sines by position and pair of dimensions, both multiplied by the attention factor."""

    __slots__ = ("cosines", "sines")

    def __init__(self, config: RopeConfig, head_dim: int, positions: int) -> None:
        frequencies, factor = rotary_frequencies(config, head_dim)
        pairs = len(frequencies)
        self.cosines: Floats = np.empty((positions, pairs), np.float32)
        self.sines: Floats = np.empty((positions, pairs), np.float32)
        step = max(1, CHUNK_NUMBERS // pairs)
        for begin in range(0, positions, step):
            end = min(begin + step, positions)
            chunk = slice(begin, end)
            self.cosines[chunk], self.sines[chunk] = rotary_angles(frequencies, factor, np.arange(begin, end))


def rotary_angles(frequencies: Floats, factor: float, positions: NDArray[np.integer]) -> tuple[Floats, Floats]:
    """Cosines and sines, float32 [positions, head_dim / 2]. The angle itself is a float32, as in training."""
    angles = positions.astype(np.float32)[:, None] * frequencies
    if angles.size and float(np.abs(angles).max()) > ANGLE_MAX:
        raise ValueError(f"an angle of more than {ANGLE_MAX:g} radians: positions must be below that")
    cosines, sines = cosines_and_sines(angles)
    factors = np.where(frequencies == 0, np.float32(1.0), np.float32(factor))  # pairs that do not rotate also keep their length
    return cosines.astype(np.float32) * factors, sines.astype(np.float32) * factors


def rotary_frequencies(config: RopeConfig, head_dim: int) -> tuple[Floats, float]:
    """Radians per position for each pair of dimensions, float32 [head_dim / 2], and the factor on cos and sin. Pairs that do
    not rotate come last and have 0."""
    rotated = head_dim if config.dimensions is None else config.dimensions
    frequencies, factor = _scaled_frequencies(config, rotated) if rotated else (np.zeros(0, np.float32), 1.0)
    return np.concatenate([frequencies, np.zeros((head_dim - rotated) // 2, np.float32)]), factor


def _scaled_frequencies(config: RopeConfig, rotated: int) -> tuple[Floats, float]:
    exponents: Floats = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    powers = [power(config.theta, exponent) for exponent in exponents.tolist()]
    plain: Floats = np.float32(1.0) / np.array(powers).astype(np.float32)
    match config.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor=factor):
            return plain / factor, 1.0
        case FrequencyDivisors(divisors=divisors, attention_factor=factor):
            return np.divide(plain, np.array(divisors, np.float32)), factor
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
    #              0         low        high                 rotated/2
    rotated = 2 * plain.size

    def pair_with_turns(times: float) -> float:
        """The pair that makes this many turns within the original context."""
        return rotated * logarithm(scaling.original_context / (times * 2 * math.pi)) / (2 * logarithm(theta))

    low, high = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp: Floats = np.arange(plain.size, dtype=np.float32)
    ramp -= low
    ramp /= max(high - low, 0.001)
    divided: Floats = ramp.clip(0.0, 1.0)
    blended: Floats = plain * (1.0 - divided) + (plain / scaling.factor) * divided
    return blended
