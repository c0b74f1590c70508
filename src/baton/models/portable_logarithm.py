"""Power and logarithm with the same bits on every host, for a few numbers at load: by `decimal`, which rounds correctly."""

from __future__ import annotations

from decimal import Context, Decimal

DIGITS = Context(prec=40)
"""Number of digits: more than twice those of a float64, so that the second rounding changes nothing."""


def power(base: float, exponent: float) -> float:
    return float(DIGITS.power(Decimal(base), Decimal(exponent)))


def logarithm(x: float) -> float:
    return float(Decimal(x).ln(DIGITS))
