"""A matrix and perhaps a bias: the one place where weights meet activations, and so where a quantised kernel goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from baton.models.loaders.weights import Weights


class Linear:
    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @classmethod
    def load(cls, weights: Weights, names: Sequence[str], *, bias: bool = False) -> Linear:
        """The linears of these names, stacked into one: a single large product is faster than several small ones."""
        return cls(
            weights.take([f"{name}.weight" for name in names]),
            weights.take([f"{name}.bias" for name in names]) if bias else None,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
