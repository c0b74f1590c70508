"""A matrix with an optional bias: the only place where weights are multiplied with activations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.dequantise import dequantise
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import Q8_0
from baton.models.torch_weights import Weights, is_quantised

GROUP = 32
"""Number of adjacent activations that share a scale: as many as a block of weights holds."""
NARROW_MOST, WIDE_MOST = 127.0, 8159.0
WIDE_OVER, MEAN_DEPTH = 9 << 19, 16 << 23
"""Constants of csrc/matmul_q4.h."""


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


class Wide(Enum):
    """The groups of activations that are rounded to two-byte numbers."""

    NONE = auto()
    LARGE = auto()
    "Groups that are larger than most groups of their row."
    ALL = auto()


class QuantisedLinear(Linear):
    """A linear layer that simulates a kernel that multiplies rounded activations with blocks of weights: both sides are rounded
    as in the kernel (csrc/matmul_q4.h), and the product is computed in float32. The oracle of such kernels, and their
    fallback."""

    __slots__ = ("wide",)

    def __init__(self, weight: Tensor, bias: Tensor | None = None, wide: Wide = Wide.NONE) -> None:
        super().__init__(weight, bias)
        self.wide = wide

    @classmethod
    def of(cls, raw: RawTensor, bias: Tensor | None = None) -> QuantisedLinear:
        return cls(torch.from_numpy(dequantise(raw)), bias, wide_for(raw))

    def __call__(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(rounded_activations(x.float(), self.wide), self.weight.float(), bias).to(x.dtype)


def wide_for(stored: RawTensor) -> Wide:
    return Wide.NONE if stored.type == Q8_0 else Wide.LARGE


def linear_of(stored: RawTensor, weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A linear layer with this weight. `stored`: the weight's source. Quantised weights are multiplied with quantised
    activations."""
    return QuantisedLinear(weight, bias, wide_for(stored)) if is_quantised(stored) else Linear(weight, bias)


def head_beside(head: Linear, others: Iterable[Linear]) -> Linear:
    """An output head beside 4-bit linears: if it has 8 bits it gets two-byte activations (native/packing.py)."""
    of_four_bits = any(isinstance(each, QuantisedLinear) and each.wide == Wide.LARGE for each in others)
    if isinstance(head, QuantisedLinear) and head.wide == Wide.NONE and of_four_bits:
        return QuantisedLinear(head.weight, head.bias, Wide.ALL)
    return head


def rounded_activations(x: Tensor, wide: Wide) -> Tensor:
    """Rounds activations. x: float32 [rows, a multiple of 32]; each group of 32 is rounded to multiples of its own scale: up to
    127, or 8159 if the group is wide.

    Ties round to even. A group with a NaN or infinity becomes NaN as a whole.
    """
    groups = x.reshape(x.shape[0], -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    most = torch.full_like(largest, WIDE_MOST if wide == Wide.ALL else NARROW_MOST)
    if wide == Wide.LARGE:
        most[wide_groups(largest[..., 0])] = WIDE_MOST
    inverse = most / largest
    inverse.masked_fill_(inverse.isinf(), 0.0)  # all numbers are zero, or so small that their scale rounds to zero
    whole = torch.minimum(torch.maximum((groups * inverse).round_(), -most), most)
    return whole.mul_(largest / most).flatten(1)


def wide_groups(largest: Tensor) -> Tensor:
    """Mask of the groups that are larger than most groups of their row.

    largest: [rows, groups]. The bits of a float grow nearly with its logarithm, so this compares with about the geometric mean,
    in integers.
    """
    bits = largest.contiguous().view(torch.int32).long()
    floor = bits.amax(-1, keepdim=True) - MEAN_DEPTH
    mean = torch.maximum(bits, floor).sum(-1, keepdim=True) // bits.shape[-1]
    return bits > mean + WIDE_OVER
