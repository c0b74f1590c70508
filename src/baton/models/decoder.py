"""The decoder all our architectures share, over a flat batch.

A step's tokens lie in one row after another, whatever sequence they belong to: a chunk of one prompt, the next token of
twenty others. Only attention cares whose they are, and attention is a socket. The last norm and the output head run in
`logits`, for the few rows that are sampled and not for a whole prompt.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.config import ModelConfig, Traits
from baton.models.config_fields import Fields
from baton.models.layers.attention import AttentionBlock, AttentionContext
from baton.models.layers.linear import Linear
from baton.models.layers.mlp import MLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import Angles, Rope
from baton.models.loaders.weights import Weights
from baton.models.parameters import EMBED, FINAL_NORM, LM_HEAD


class DecoderLayer:
    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        prefix = f"layers.{layer}."
        self.attention_norm = RMSNorm(weights.take([f"{prefix}attention_norm.weight"]), config.norm_eps)
        self.attention = AttentionBlock(config, weights, layer)
        self.mlp_norm = RMSNorm(weights.take([f"{prefix}mlp_norm.weight"]), config.norm_eps)
        self.mlp = MLP(config, weights, layer)

    def add_to(self, hidden: Tensor, angles: Angles, attention: AttentionContext) -> None:
        """Both halves of the layer add their part to `hidden`, in place."""
        hidden += self.attention(self.attention_norm(hidden), angles, attention)
        hidden += self.mlp(self.mlp_norm(hidden))


class Decoder:
    """Base of every architecture. A subclass says how its files name it and which traits it has."""

    name: ClassVar[str]
    "ModelConfig.architecture."
    hf_names: ClassVar[tuple[str, ...]]
    "`architectures` in a Hugging Face config.json."
    gguf_name: ClassVar[str]
    "`general.architecture` in a GGUF file."
    gguf_rotary_interleaved: ClassVar[bool]
    "GGUF files of this architecture keep the two dimensions of a rotary pair side by side (loaders/gguf.py)."

    @classmethod
    def traits_from_hf(cls, fields: Fields) -> Traits:
        """From config.json."""
        raise NotImplementedError

    @classmethod
    def traits_from_gguf(cls, fields: Fields, tensors: Collection[str]) -> Traits:
        """From metadata (keys without the architecture's prefix) and the names of the tensors."""
        raise NotImplementedError

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = weights.dtype
        self.device = weights.device
        self.embedding = weights.take([EMBED])
        self.layers = [DecoderLayer(config, weights, layer) for layer in range(config.layers)]
        self.final_norm = RMSNorm(weights.take([FINAL_NORM]), config.norm_eps)
        self.head = Linear(self.embedding if config.tied_embeddings else weights.take([LM_HEAD]))
        self.rope = Rope(config.rope, config.head_dim, weights.device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """token_ids, positions: integers [tokens] -> hidden [tokens, hidden_size], before the last norm."""
        hidden = F.embedding(token_ids, self.embedding)
        angles = self.rope.angles(positions, self.dtype)
        for layer in self.layers:
            layer.add_to(hidden, angles, attention)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Any rows of forward()'s result [rows, hidden_size] -> [rows, vocab_size]."""
        return self.head(self.final_norm(hidden))

    def __repr__(self) -> str:
        c = self.config
        shape = f"{c.layers} layers, {c.hidden_size} wide, {c.heads}/{c.kv_heads} heads"
        return f"<{type(self).__name__} {shape}, {self.dtype} on {self.device}>"
