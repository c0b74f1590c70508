"""Functions whose bits no library decides, against exact arithmetic."""

from __future__ import annotations

import builtins
import hashlib
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from baton.models.config import Llama3Scaling, RopeConfig, YarnScaling
from baton.models.portable_logarithm import logarithm, power
from baton.models.portable_math import ANGLE_MAX, cosines_and_sines
from baton.models.rotary import RotaryTable, rotary_angles, rotary_frequencies

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")


def exact_cosine(angle: float) -> float:
    """By the series, in 90 digits."""
    with localcontext() as context:
        context.prec = 90
        x = Decimal(angle) % (2 * PI)
        term = total = Decimal(1)
        for n in range(1, 60):
            term *= -x * x / (2 * n * (2 * n - 1))
            total += term
        return float(total)


def exact_sine(angle: float) -> float:
    with localcontext() as context:
        context.prec = 90
        x = Decimal(angle) % (2 * PI)
        term = total = x
        for n in range(1, 60):
            term *= -x * x / (2 * n * (2 * n + 1))
            total += term
        return float(total)


def some_angles() -> np.ndarray:
    """Of every size, and those next to multiples of a quarter turn, where most digits cancel out."""
    rng = np.random.default_rng(0)
    sizes = rng.random(150) * 10.0 ** rng.uniform(-6, 6.2, 150)
    quarters = rng.integers(1, 1 << 20, 100) * (math.pi / 2)
    special = [0.0, 1.0, math.pi, 1.5e6, 6381956970095103 * 2.0**-33]
    return np.concatenate((sizes, quarters, special)).astype(np.float32)


def test_cosines_and_sines_are_the_nearest_float32():
    angles = some_angles()
    cosines, sines = cosines_and_sines(angles)
    for angle, cosine, sine in zip(angles.tolist(), cosines, sines, strict=True):
        assert np.float32(cosine) == np.float32(exact_cosine(angle)), angle
        assert np.float32(sine) == np.float32(exact_sine(angle)), angle
        assert abs(cosine - exact_cosine(angle)) <= 4e-16
        assert abs(sine - exact_sine(angle)) <= 4e-16


def test_their_bits_are_what_they_are_on_every_other_host():
    """A digest that was written down once: another processor, another numpy or another libc must give the same."""
    table = RotaryTable(RopeConfig(theta=100000.0), 64, 8192)
    digest = hashlib.sha256(table.cosines.tobytes() + table.sines.tobytes()).hexdigest()
    assert digest == "f853a836073f5466fa4b0c247678cc7b2759402113a2f8ed385632615946315a"


def test_a_table_has_the_numbers_of_single_positions():
    config = RopeConfig(
        theta=500000.0, scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)
    )
    table = RotaryTable(config, 24, 3000)
    frequencies, factor = rotary_frequencies(config, 24)
    for positions in ([0], [2999, 17, 2999], list(range(1000, 2400))):
        cosines, sines = rotary_angles(frequencies, factor, np.array(positions))
        assert np.array_equal(table.cosines[positions], cosines)
        assert np.array_equal(table.sines[positions], sines)


def test_an_angle_that_is_too_large_is_refused_and_not_wrong():
    one = np.ones(1, np.float32)
    rotary_angles(one, 1.0, np.array([int(ANGLE_MAX)]))
    with pytest.raises(ValueError, match="radians"):
        rotary_angles(one, 1.0, np.array([int(ANGLE_MAX) + 1]))


def test_powers_and_logarithms():
    for base, exponent in ((10000.0, 0.3125), (1e6, 0.984375), (500000.0, 0.0), (4.0, 0.5)):
        assert power(base, exponent) == pytest.approx(base**exponent, rel=1e-15)
    for x in (0.3, 1.0, 40.0, 131072.0):
        assert logarithm(x) == pytest.approx(math.log(x), rel=1e-15, abs=1e-16)


def test_no_library_is_asked(monkeypatch):
    """A libm of another system, made up: nothing changes."""
    configs = [RopeConfig(theta=10000.0), RopeConfig(theta=1e6, scaling=YarnScaling(factor=4.0, original_context=4096))]
    before = [RotaryTable(config, 64, 500) for config in configs]

    def wrong(*arguments: object, **options: object) -> object:
        raise AssertionError("the system's math library was asked")

    for name in ("sin", "cos", "tan", "exp", "exp2", "log", "log2", "power", "float_power"):
        monkeypatch.setattr(np, name, wrong)
    for name in ("sin", "cos", "exp", "log", "log2", "pow"):
        monkeypatch.setattr(math, name, wrong)
    monkeypatch.setattr(builtins, "pow", wrong)
    for table, config in zip(before, configs, strict=True):
        again = RotaryTable(config, 64, 500)
        assert np.array_equal(again.cosines, table.cosines)
        assert np.array_equal(again.sines, table.sines)
