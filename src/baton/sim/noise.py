"""Randomness that does not depend on earlier draws."""

from __future__ import annotations


def noise(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: removing one thing from a run does not change other draws."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xD6E8FEB86659FD93) & (1 << 64) - 1
    mixed = (mixed ^ mixed >> 31) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    return (mixed >> 40) / (1 << 24)
