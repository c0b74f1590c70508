"""The attention block, and the interface of attention, which the owner of the KV cache implements.

hidden -> one product gives queries, keys and values of every token -> (norm) -> rotation -> AttentionContext -> output
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.layers.linear import Linear
from baton.models.layers.norm import HeadNorm, Norm, RowNorm
from baton.models.layers.rope import Angles, rotate
from baton.models.torch_weights import Weights


class AttentionContext(Protocol):
    """The attention of one step: knows the sequence of each row and the place of its keys and values.

    Called once per layer. Stores k and v, and lets every row of q attend to all rows of its own sequence up to and including
    itself (within ModelConfig.window(layer), if set), with scores times ModelConfig.attention_scale. The head's sink, if any,
    takes part in the softmax.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, /) -> Tensor:
        """Attend with one layer. q: [tokens, heads, head_dim], k and v: [tokens, kv_heads, head_dim] -> [tokens, heads *
        head_dim].

        The inputs are already rotated. They may be views with gaps between rows; only the last dimension is dense.
        """
        ...


def shares_of(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [..., heads, rows, keys], together with the sinks [..., heads] if given."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores.dtype)[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, beside), -1).softmax(-1)[..., :-1]


class AttentionBlock:
    __slots__ = ("config", "head_norm", "layer", "output", "qkv", "sinks")

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        self.config = config
        self.layer = layer
        prefix = f"layers.{layer}.attention."
        traits = config.traits
        self.qkv = Linear.load(weights, [f"{prefix}q", f"{prefix}k", f"{prefix}v"], bias=traits.qkv_bias)
        self.output = Linear.load(weights, [f"{prefix}o"], bias=traits.output_bias)
        self.sinks = weights.take([f"{prefix}sinks"]) if traits.sinks else None
        self.head_norm: Norm | None = None
        if traits.qk_norm:
            q_norm, k_norm = weights.take([f"{prefix}q_norm.weight"]), weights.take([f"{prefix}k_norm.weight"])
            if traits.qk_norm_across_heads:
                self.head_norm = RowNorm(q_norm, k_norm, config.heads, config.norm_eps)
            else:
                self.head_norm = HeadNorm(q_norm, k_norm, config.heads, config.kv_heads, config.norm_eps)

    def __call__(self, hidden: Tensor, angles: Angles, attention: AttentionContext) -> Tensor:
        heads, kv_heads, head_dim = self.config.heads, self.config.kv_heads, self.config.head_dim
        # The row of a token: |-- q of every head --|-- k of every kv head --|-- v of every kv head --|
        # Queries and keys are adjacent, so norm and rotation treat them as one run of heads.
        qkv = self.qkv(hidden).view(-1, heads + 2 * kv_heads, head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        qk = rotate(qk, angles)
        return self.output(attention(self.layer, qk[:, :heads], qk[:, heads:], v, self.sinks))
