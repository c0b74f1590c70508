"""Vectors on the wire: float32, little-endian, one behind the other."""

from __future__ import annotations

import sys
from array import array


def floats(vector: bytes) -> list[float]:
    numbers = array("f")
    numbers.frombytes(vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
