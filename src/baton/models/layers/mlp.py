"""SwiGLU: down(silu(gate(x)) * up(x)), with gate and up as one product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.layers.linear import Linear
from baton.models.torch_weights import Weights


class MLP:
    __slots__ = ("down", "gate_up", "width")

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        prefix, bias = f"layers.{layer}.mlp.", config.traits.mlp_bias
        self.width = config.intermediate_size
        self.gate_up = Linear.load(weights, [f"{prefix}gate", f"{prefix}up"], bias=bias)
        self.down = Linear.load(weights, [f"{prefix}down"], bias=bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        gate_up = self.gate_up(hidden)
        # In place: for a step of 256 tokens on a CPU a fresh product tensor costs more than the product itself.
        return self.down(F.silu(gate_up[:, : self.width]).mul_(gate_up[:, self.width :]))
