"""Cosine and sine with the same bits on every host: the system's math library is not used, because its results differ between
libraries and versions.

(Power and logarithm: portable_logarithm.py.) Both are a sequence of float64 additions and multiplications, each rounded by IEEE
754: first the angle is reduced modulo a quarter turn (Cody and Waite: a quarter turn in three parts, of which the first two
have so few digits that their products are exact), then the two polynomials of Sun's fdlibm. The error is a unit or two in the
last place of a float64, so the float32 next to it is the correctly rounded one but for about one angle in 10^8.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from baton.models.raw_tensor import Floats

Doubles = NDArray[np.float64]

ANGLE_MAX = 1.6e6
"""Largest angle in radians: 2^20 quarter turns. Beyond, products with the parts of a quarter turn are no longer exact."""

QUARTERS_PER_RADIAN = float.fromhex("0x1.45f306dc9c883p-1")
QUARTER = (
    float.fromhex("0x1.921fb544p+0"),
    float.fromhex("0x1.0b4611a6p-34"),
    float.fromhex("0x1.3198a2e037073p-69"),
)
"""Parts of pi / 2, with 33, 33 and 53 bits."""
SINE = tuple(
    float.fromhex(text)
    for text in (
        "0x1.5d93a5acfd57cp-33",
        "-0x1.ae5e68a2b9cebp-26",
        "0x1.71de357b1fe7dp-19",
        "-0x1.a01a019c161d5p-13",
        "0x1.111111110f8a6p-7",
        "-0x1.5555555555549p-3",
    )
)
"""Coefficients of (sin x - x) / x^3, in powers of x^2, highest first."""
COSINE = tuple(
    float.fromhex(text)
    for text in (
        "-0x1.8fae9be8838d4p-37",
        "0x1.1ee9ebdb4b1c4p-29",
        "-0x1.27e4f809c52adp-22",
        "0x1.a01a019cb1590p-16",
        "-0x1.6c16c16c15177p-10",
        "0x1.555555555554cp-5",
    )
)
"""Coefficients of (cos x - 1 + x^2 / 2) / x^4."""


def cosines_and_sines(angles: Floats) -> tuple[Doubles, Doubles]:
    """Cosines and sines of float32 angles up to ANGLE_MAX."""
    x = angles.astype(np.float64)
    quarters = np.rint(x * QUARTERS_PER_RADIAN)
    for part in QUARTER:
        x -= quarters * part
    square = x * x
    sine = x + x * square * _polynomial(SINE, square)
    half = 0.5 * square
    rest = 1.0 - half
    cosine = rest + (((1.0 - rest) - half) + square * square * _polynomial(COSINE, square))
    quadrant = quarters.astype(np.int64) & 3
    odd = (quadrant & 1).astype(bool)
    cosines, sines = np.where(odd, sine, cosine), np.where(odd, cosine, sine)
    np.negative(cosines, out=cosines, where=(quadrant + 1 & 2).astype(bool))
    np.negative(sines, out=sines, where=(quadrant & 2).astype(bool))
    return cosines, sines


def _polynomial(coefficients: tuple[float, ...], x: Doubles) -> Doubles:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value *= x
        value += coefficient
    return value
