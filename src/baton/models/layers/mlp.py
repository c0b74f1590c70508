"""A gated MLP: down(activation(gate(x)) * up(x)), with gate and up as one product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from baton.models.config import OAI_LIMIT, OAI_SLOPE, Activation
from baton.models.layers.linear import Linear
from baton.models.torch_weights import Weights


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The activation act(gate) * up. swiglu_oai: both are clamped, the sigmoid is steeper, and 1 is added to up (gpt-oss)."""
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=OAI_LIMIT), up.clamp(-OAI_LIMIT, OAI_LIMIT)
        return (gate * OAI_SLOPE).sigmoid_().mul_(gate).mul_(up + 1.0)
    # In place: for a step of 256 tokens on a CPU a new product tensor costs more than the product itself.
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


class MLP:
    __slots__ = ("activation", "down", "gate_up", "width")

    def __init__(
        self, weights: Weights, prefix: str, width: int, *, bias: bool = False, activation: Activation = "silu"
    ) -> None:
        """`prefix`: of the parameters' names."""
        self.width, self.activation = width, activation
        self.gate_up = Linear.load(weights, [f"{prefix}gate", f"{prefix}up"], bias=bias)
        self.down = Linear.load(weights, [f"{prefix}down"], bias=bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        gate_up = self.gate_up(hidden)
        return self.down(gated(gate_up[:, : self.width], gate_up[:, self.width :], self.activation))

    def linears(self) -> list[Linear]:
        return [self.gate_up, self.down]
