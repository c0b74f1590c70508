"""Which traits of a model a way to compute does not have. torch has them all (models/decoder.py), several times slower."""

from __future__ import annotations

from baton.models.config import ModelConfig


def native_lacks(model: ModelConfig) -> list[str]:
    """Of the C kernels, in words. Empty: they compute this model."""
    return []


def cuda_lacks(model: ModelConfig) -> list[str]:
    """Of the Triton kernels, in words."""
    return []
