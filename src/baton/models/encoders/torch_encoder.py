"""An encoder in torch, over a flat batch without padding.

Rows of all sequences are consecutive; linear layers and norms work on rows. Attention works on each sequence separately:
adjacent sequences of equal length share a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.config import RopeConfig
from baton.models.encoders.config import ClassHead, EncoderActivation, EncoderConfig
from baton.models.encoders.parameters import has_attention_norm, product_names
from baton.models.layers.norm import LayerNorm
from baton.models.layers.rope import Angles, Rope, rotate
from baton.models.torch_weights import Weights

ACTIVATIONS: dict[EncoderActivation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda rows: F.gelu(rows, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Adjacent sequences of equal length."""

    begin: int
    "First row of the first sequence."
    count: int
    length: int

    @property
    def end(self) -> int:
        return self.begin + self.count * self.length


class Groups:
    """The sequences of a flat batch, and the masks of attention that their lengths need, made once for all layers."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.groups: list[LengthGroup] = []
        self._device = device
        self._masks: dict[tuple[int, int], Tensor] = {}
        begin = 0
        for length, same in groupby(lengths):
            self.groups.append(LengthGroup(begin, len(list(same)), length))
            begin = self.groups[-1].end

    def mask(self, length: int, window: int | None) -> Tensor | None:
        """Mask that is True where a token attends: at most `window` tokens to either side. None: everywhere."""
        if window is None or length <= window + 1:
            return None
        if (length, window) not in self._masks:
            at = torch.arange(length, device=self._device)
            self._masks[length, window] = (at - at[:, None]).abs() <= window
        return self._masks[length, window]


class Product:
    """A linear layer, from the rows of one or more parameters."""

    __slots__ = ("bias", "weight")

    def __init__(self, weights: Weights, names: Sequence[str], *, bias: bool) -> None:
        self.weight = weights.take([f"{name}.weight" for name in names])
        self.bias = weights.take([f"{name}.bias" for name in names]) if bias else None

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight, self.bias)


class EncoderLayer:
    def __init__(self, config: EncoderConfig, weights: Weights, layer: int) -> None:
        prefix = f"layers.{layer}."
        self.heads, self.modern, self.activation = config.heads, config.modern, ACTIVATIONS[config.activation]
        self.window = config.windows[layer] if config.windows else None
        self.theta = config.thetas[layer] if config.thetas else None
        normed = has_attention_norm(config, layer)
        self.attention_norm = _norm(config, weights, f"{prefix}attention_norm") if normed else None
        self.mlp_norm = _norm(config, weights, f"{prefix}mlp_norm")
        self.qkv = Product(weights, product_names(config, layer, "attention.qkv"), bias=config.attention_bias)
        self.output = Product(weights, [f"{prefix}attention.o"], bias=config.attention_bias)
        self.up = Product(weights, product_names(config, layer, "mlp.up"), bias=config.mlp_bias)
        self.down = Product(weights, [f"{prefix}mlp.down"], bias=config.mlp_bias)

    def __call__(self, hidden: Tensor, groups: Groups, angles: Angles | None) -> Tensor:
        if self.modern:  # norms before attention and MLP
            normed = hidden if self.attention_norm is None else self.attention_norm(hidden)
            hidden = hidden + self._attention(normed, groups, angles)
            return hidden + self._mlp(self.mlp_norm(hidden))
        assert self.attention_norm is not None
        hidden = self.attention_norm(self._attention(hidden, groups, angles) + hidden)
        return self.mlp_norm(self._mlp(hidden) + hidden)

    def _mlp(self, rows: Tensor) -> Tensor:
        up = self.up(rows)
        if self.modern:
            activated, gate = up.chunk(2, -1)
            return self.down(self.activation(activated) * gate)
        return self.down(self.activation(up))

    def _attention(self, rows: Tensor, groups: Groups, angles: Angles | None) -> Tensor:
        qkv = self.qkv(rows).view(len(rows), 3, self.heads, -1)
        q, k, v = qkv.unbind(1)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        attended = torch.empty_like(v)
        for group in groups.groups:
            shape = (group.count, group.length, *v.shape[1:])  # transposed to [sequences, heads, tokens, head_dim]
            of_q, of_k, of_v = (x[group.begin : group.end].reshape(shape).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(of_q, of_k, of_v, attn_mask=groups.mask(group.length, self.window))
            attended[group.begin : group.end] = out.transpose(1, 2).flatten(0, 1)
        return self.output(attended.flatten(1))


class ClassLayers:
    """A ClassHead with its weights."""

    def __init__(self, config: EncoderConfig, head: ClassHead, weights: Weights) -> None:
        self.activation = ACTIVATIONS[head.activation]
        self.dense = Product(weights, ["head.dense"], bias=head.dense_bias)
        self.norm = _norm(config, weights, "head.norm") if head.norm else None
        self.out = Product(weights, ["head.out"], bias=True)

    def __call__(self, pooled: Tensor) -> Tensor:
        rows = self.activation(self.dense(pooled))
        return self.out(rows if self.norm is None else self.norm(rows))


class Encoder:
    def __init__(self, config: EncoderConfig, weights: Weights) -> None:
        self.config, self.dtype, self.device = config, weights.dtype, weights.device
        self.embedding = weights.take(["embed.weight"])
        self.positions = weights.take(["positions.weight"]) if config.positions else None
        self.types = weights.take(["types.weight"]) if config.types else None
        self.embed_norm = _norm(config, weights, "embed_norm")
        self.layers = [EncoderLayer(config, weights, layer) for layer in range(config.layers)]
        self.final_norm = _norm(config, weights, "final_norm") if config.modern else None
        self.classes = None if config.head is None else ClassLayers(config, config.head, weights)
        bases = {layer.theta for layer in self.layers if layer.theta is not None}
        self.ropes = {base: Rope(RopeConfig(theta=base), config.head_dim, weights.device) for base in bases}
        self.on_layer: Callable[[], None] = lambda: None
        "Called after each layer, for progress watchdogs."

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden states of tokens. token_ids: integers [tokens] of sequences of these lengths -> states [tokens, hidden_size],
        after the last norm."""
        groups = Groups(lengths, self.device)
        positions = torch.cat([torch.arange(length) for length in lengths])
        hidden = F.embedding(token_ids, self.embedding)
        if self.types is not None:
            hidden = hidden + F.embedding(self._types(token_ids, lengths), self.types)
        if self.positions is not None:
            hidden = hidden + F.embedding((positions + self.config.position_offset).to(self.device), self.positions)
        hidden = self.embed_norm(hidden)
        angles = {base: rope.angles(positions, self.dtype) for base, rope in self.ropes.items()}
        for layer in self.layers:
            hidden = layer(hidden, groups, None if layer.theta is None else angles[layer.theta])
            self.on_layer()
        return hidden if self.final_norm is None else self.final_norm(hidden)

    @torch.inference_mode()
    def logits(self, pooled: Tensor) -> Tensor:
        """Logits of the classes: pooled states [rows, hidden_size] -> [rows, classes]."""
        assert self.classes is not None
        return self.classes(pooled)

    def _types(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Token types: 1 after the first separator of a sequence, else 0."""
        separator = self.config.pair_separator
        if separator is None:
            return torch.zeros_like(token_ids)
        marks = (token_ids == separator).int()
        return torch.cat([(part.cumsum(0) - part > 0).int() for part in torch.split(marks, list(lengths))])


def _norm(config: EncoderConfig, weights: Weights, name: str) -> LayerNorm:
    bias = weights.take([f"{name}.bias"]) if config.norm_bias else None
    return LayerNorm(weights.take([f"{name}.weight"]), bias, config.norm_eps)
