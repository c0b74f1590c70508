"""Traits that a backend does not support. torch supports all (models/decoder.py), several times slower."""

from __future__ import annotations

from baton.models.config import ModelConfig


def native_lacks(model: ModelConfig) -> list[str]:
    """Traits that the C kernels lack. Empty: they support this model."""
    return []


def cuda_lacks(model: ModelConfig) -> list[str]:
    """Traits that the Triton kernels lack."""
    return []
