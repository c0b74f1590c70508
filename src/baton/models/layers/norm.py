"""Root-mean-square norm over the last dimension."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    __slots__ = ("eps", "weight", "width")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self.width = [weight.shape[-1]]

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.width, self.weight, self.eps)


class HeadNorm:
    """Query and key norms as one: each head is normalised alone, then scaled by its own row of `weight`.

    Stacking the two saves a pass: queries and keys leave the projection side by side and go through here together.
    """

    __slots__ = ("eps", "weight", "width")

    def __init__(self, q_weight: Tensor, k_weight: Tensor, heads: int, kv_heads: int, eps: float) -> None:
        self.weight = q_weight.new_empty(heads + kv_heads, q_weight.shape[0])
        self.weight[:heads] = q_weight
        self.weight[heads:] = k_weight
        self.eps = eps
        self.width = [q_weight.shape[0]]

    def __call__(self, qk: Tensor) -> Tensor:
        """qk: [tokens, heads + kv_heads, head_dim]."""
        return F.rms_norm(qk, self.width, None, self.eps).mul_(self.weight)
