"""A matrix and perhaps a bias: the one place where weights meet activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.dequantise import dequantise
from baton.models.raw_tensor import RawTensor
from baton.models.torch_weights import Weights, is_quantised

GROUP = 32
"""Neighbouring activations that share a scale: as many as a block of weights holds."""


class Linear:
    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @staticmethod
    def load(weights: Weights, names: Sequence[str], *, bias: bool = False) -> Linear:
        """The linears of these names, stacked into one: a single large product is faster than several small ones."""
        parts = [weights.take_raw(f"{name}.weight") for name in names]
        added = weights.take([f"{name}.bias" for name in names]) if bias else None
        return linear_of(parts[0], weights.stacked(parts), added)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class QuantisedLinear(Linear):
    """What a kernel that multiplies 8-bit activations with blocks of weights computes, without being one: both sides are
    rounded as the kernel rounds them, and the product is taken in float32. The oracle of such kernels, and their stand-in."""

    __slots__ = ()

    @classmethod
    def of(cls, raw: RawTensor, bias: Tensor | None = None) -> QuantisedLinear:
        return cls(torch.from_numpy(dequantise(raw)), bias)

    def __call__(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(rounded_to_int8(x.float()), self.weight.float(), bias).to(x.dtype)


def linear_of(stored: RawTensor, weight: Tensor, bias: Tensor | None = None) -> Linear:
    """`stored`: what the weight was made of. Quantised weights are multiplied with quantised activations."""
    return QuantisedLinear(weight, bias) if is_quantised(stored) else Linear(weight, bias)


def rounded_to_int8(x: Tensor) -> Tensor:
    """x: float32 [rows, a multiple of 32]; each group of 32 is rounded to whole multiples, up to 127, of its own scale.

    Ties go to the even one. A group with a number that is none becomes not-a-number as a whole.
    """
    groups = x.reshape(x.shape[0], -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = 127.0 / largest
    inverse.masked_fill_(inverse.isinf(), 0.0)  # all zero, or so small that its scale cannot be told from zero
    whole = (groups * inverse).round_().clamp_(-127.0, 127.0)
    return whole.mul_(largest / 127.0).flatten(1)
