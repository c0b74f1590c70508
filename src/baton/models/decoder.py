"""The decoder all our architectures share, over a flat batch.

A step's tokens lie in one row after another, whatever sequence they belong to: a chunk of one prompt, the next token of
twenty others. Only attention cares whose they are, and attention is a socket. The last norm and the output head run in
`logits`, for the few rows that are sampled and not for a whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.layers.attention import AttentionBlock, AttentionContext
from baton.models.layers.experts import ExpertMixture
from baton.models.layers.linear import Linear, linear_of
from baton.models.layers.mlp import MLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import Angles, Rope
from baton.models.parameters import EMBED, FINAL_NORM
from baton.models.torch_weights import Weights


class DecoderLayer:
    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        prefix = f"layers.{layer}."
        self.attention_norm = RMSNorm(weights.take([f"{prefix}attention_norm.weight"]), config.norm_eps)
        self.attention = AttentionBlock(config, weights, layer)
        self.mlp_norm = RMSNorm(weights.take([f"{prefix}mlp_norm.weight"]), config.norm_eps)
        self.mlp = MLP(config, weights, layer) if config.experts is None else ExpertMixture(config.experts, weights, layer)

    def add_to(self, hidden: Tensor, angles: Angles, attention: AttentionContext) -> None:
        """Both halves of the layer add their part to `hidden`, in place."""
        hidden += self.attention(self.attention_norm(hidden), angles, attention)
        hidden += self.mlp(self.mlp_norm(hidden))


class Decoder:
    """Of any architecture: in what they differ is in ModelConfig.traits."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = weights.dtype
        self.device = weights.device
        embedding = weights.take_raw(EMBED)
        self.embedding = weights.stacked([embedding])
        self.layers = [DecoderLayer(config, weights, layer) for layer in range(config.layers)]
        self.final_norm = RMSNorm(weights.take([FINAL_NORM]), config.norm_eps)
        self.head = linear_of(embedding, self.embedding) if config.tied_embeddings else Linear.load(weights, ["lm_head"])
        self.on_layer: Callable[[], None] = lambda: None
        "Called when a layer is done: somebody may watch that it gets on."
        self.rope = Rope(config.rope, config.head_dim, weights.device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """token_ids, positions: integers [tokens] -> hidden [tokens, hidden_size], before the last norm."""
        hidden = F.embedding(token_ids, self.embedding)
        angles = self.rope.angles(positions, self.dtype)
        for layer in self.layers:
            layer.add_to(hidden, angles, attention)
            self.on_layer()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Any rows of forward()'s result [rows, hidden_size] -> [rows, vocab_size]."""
        return self.head(self.final_norm(hidden))

    def __repr__(self) -> str:
        c = self.config
        shape = f"{c.layers} layers, {c.hidden_size} wide, {c.heads}/{c.kv_heads} heads"
        return f"<Decoder {c.architecture}, {shape}, {self.dtype} on {self.device}>"
