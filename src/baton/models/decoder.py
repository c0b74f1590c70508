"""The decoder of all architectures, over a flat batch.

A step's tokens are consecutive rows of all its sequences: a chunk of one prompt, the next token of twenty others. Only
attention distinguishes sequences, and attention is an interface. The last norm and the output head run in `logits`, only for
the few rows that are sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.layers.attention import AttentionBlock, AttentionContext
from baton.models.layers.experts import ExpertMixture
from baton.models.layers.linear import Linear, head_beside, linear_of
from baton.models.layers.mlp import MLP
from baton.models.layers.norm import Norm, norm_of
from baton.models.layers.rope import Angles, Rope
from baton.models.parameters import EMBED, layer_norms
from baton.models.ranks import TensorCollective, gather_logits
from baton.models.torch_weights import Weights


class DecoderLayer:
    """hidden += attention(norm(hidden)), hidden += mlp(norm(hidden)); traits set the places of the norms, and whether both read
    the same input."""

    __slots__ = (
        *("attention", "attention_norm", "attention_post_norm", "mlp", "mlp_norm", "mlp_post_norm", "parallel", "rope"),
        "summed",
    )

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, collective: TensorCollective | None = None) -> None:
        prefix, traits, here = f"layers.{layer}.", config.traits, layer_norms(config)

        def norm(name: str) -> Norm:
            return norm_of(config, weights, f"{prefix}{name}") if name in here else _unchanged

        self.parallel = traits.parallel
        self.rope = config.layer_rope(layer)
        self.summed: Callable[[Tensor], Tensor] = _unchanged if collective is None else partial(_summed, collective)
        "Collective that adds up the parts of several ranks, where attention and MLP end."
        self.attention_norm, self.attention_post_norm = norm("attention_norm"), norm("attention_post_norm")
        self.attention = AttentionBlock(config, weights, layer)
        self.mlp_norm, self.mlp_post_norm = norm("mlp_norm"), norm("mlp_post_norm")
        experts = config.layer_experts(layer)
        self.mlp: MLP | ExpertMixture
        if experts is None:
            width, activation = config.intermediate_size, traits.activation
            self.mlp = MLP(weights, f"{prefix}mlp.", width, bias=traits.mlp_bias, activation=activation)
        else:
            self.mlp = ExpertMixture(experts, weights, layer, traits.activation, config.own_experts)

    def add_to(self, hidden: Tensor, angles: Angles, attention: AttentionContext) -> None:
        """Adds both halves of the layer to `hidden`, in place."""
        normed = self.attention_norm(hidden)
        attended = self.attention_post_norm(self.summed(self.attention(normed, angles, attention)))
        if self.parallel:
            attended = attended + self.summed(self.mlp(normed))
        hidden += attended
        if not self.parallel:
            hidden += self.mlp_post_norm(self.summed(self.mlp(self.mlp_norm(hidden))))

    def linears(self) -> list[Linear]:
        return [self.attention.qkv, self.attention.output, *self.mlp.linears()]


def _unchanged(rows: Tensor) -> Tensor:
    return rows


def _summed(collective: TensorCollective, rows: Tensor) -> Tensor:
    rows = rows.contiguous()
    collective.sum(rows)
    return rows


class Decoder:
    """A decoder of any architecture: ModelConfig.traits has the differences."""

    def __init__(self, config: ModelConfig, weights: Weights, collective: TensorCollective | None = None) -> None:
        """`collective`: the other ranks, if the config is of one rank's part (loaders/sharded.py)."""
        self.config = config
        self._collective = collective
        self.dtype = weights.dtype
        self.device = weights.device
        embedding = weights.take_raw(EMBED)
        self.embedding = weights.stacked([embedding])
        self.layers = [DecoderLayer(config, weights, layer, collective) for layer in range(config.layers)]
        self.final_norm = norm_of(config, weights, "final_norm")
        rows = config.head_rows
        of_embedding = self.embedding[rows.start : rows.stop]
        head = linear_of(embedding, of_embedding) if config.tied_embeddings else Linear.load(weights, ["lm_head"])
        self.head = head_beside(head, [linear for layer in self.layers for linear in layer.linears()])
        self.on_layer: Callable[[], None] = lambda: None
        "Called after each layer, for progress watchdogs."
        ropes = {layer.rope for layer in self.layers}
        self.ropes = {rope: Rope(rope, config.head_dim, weights.device) for rope in ropes}

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """Hidden states of tokens. token_ids, positions: integers [tokens] -> hidden [tokens, hidden_size], before the last
        norm."""
        hidden = F.embedding(token_ids, self.embedding)
        if self.config.traits.embedding_scale != 1.0:
            hidden *= self.config.traits.embedding_scale
        angles = {config: rope.angles(positions, self.dtype) for config, rope in self.ropes.items()}
        for layer in self.layers:
            layer.add_to(hidden, angles[layer.rope], attention)
            self.on_layer()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of any rows of forward()'s result, [rows, hidden_size] -> [rows, vocab_size]."""
        logits = self.head(self.final_norm(hidden))
        return logits if self._collective is None else gather_logits(self.config, self._collective, logits)

    def __repr__(self) -> str:
        c = self.config
        shape = f"{c.layers} layers, {c.hidden_size} wide, {c.heads}/{c.kv_heads} heads"
        return f"<Decoder {c.architecture}, {shape}, {self.dtype} on {self.device}>"
