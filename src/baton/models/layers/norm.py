"""Norms over the last dimension: of the residual, of layer outputs, and of queries and keys."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.torch_weights import Weights

Norm = Callable[[Tensor], Tensor]


def norm_of(config: ModelConfig, weights: Weights, name: str) -> RMSNorm | LayerNorm:
    weight = weights.take([f"{name}.weight"])
    if not config.traits.layer_norm:
        return RMSNorm(weight, config.norm_eps)
    return LayerNorm(weight, weights.take([f"{name}.bias"]) if config.traits.norm_bias else None, config.norm_eps)


class RMSNorm:
    __slots__ = ("eps", "weight", "width")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self.width = [weight.shape[-1]]

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.width, self.weight, self.eps)


class LayerNorm:
    __slots__ = ("bias", "eps", "weight", "width")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps
        self.width = [weight.shape[-1]]

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.width, self.weight, self.bias, self.eps)


class HeadNorm:
    """Query and key norms as one: each head is normalised separately, then scaled by its own row of `weight`.

    Stacking saves a pass: queries and keys are adjacent in the projection's output.
    """

    __slots__ = ("eps", "weight", "width")

    def __init__(self, q_weight: Tensor, k_weight: Tensor, heads: int, kv_heads: int, eps: float) -> None:
        self.weight = q_weight.new_empty(heads + kv_heads, q_weight.shape[0])
        self.weight[:heads] = q_weight
        self.weight[heads:] = k_weight
        self.eps = eps
        self.width = [q_weight.shape[0]]

    def __call__(self, qk: Tensor) -> Tensor:
        """The normalised heads of qk, [tokens, heads + kv_heads, head_dim]."""
        return F.rms_norm(qk, self.width, None, self.eps).mul_(self.weight)


class RowNorm:
    """Query and key norms over all heads of a token as one row."""

    __slots__ = ("eps", "heads", "k_weight", "q_weight")

    def __init__(self, q_weight: Tensor, k_weight: Tensor, heads: int, eps: float) -> None:
        self.q_weight, self.k_weight, self.heads, self.eps = q_weight, k_weight, heads, eps

    def __call__(self, qk: Tensor) -> Tensor:
        """The normalised rows of qk, [tokens, heads + kv_heads, head_dim]."""
        out = qk.new_empty(qk.shape)
        for part, weight in ((slice(0, self.heads), self.q_weight), (slice(self.heads, None), self.k_weight)):
            rows = qk[:, part].flatten(1)
            out[:, part] = F.rms_norm(rows, [rows.shape[1]], weight, self.eps).view_as(out[:, part])
        return out
