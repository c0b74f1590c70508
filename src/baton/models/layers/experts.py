"""A mixture of experts: each row is sent to the few that the router likes best, and their answers are added by shares.

Expert by expert, each with the rows that were sent to it: plain, and the oracle of grouped kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.config import Experts
from baton.models.parameters import expert_names
from baton.models.torch_weights import Weights


class ExpertMixture:
    __slots__ = ("down", "experts", "gate_up", "router")

    def __init__(self, experts: Experts, weights: Weights, layer: int) -> None:
        self.experts = experts
        self.router = weights.take([f"layers.{layer}.mlp.router.weight"])
        gate_up = weights.take(expert_names(layer, experts.count, "gate", "up"))
        self.gate_up = gate_up.view(experts.count, 2 * experts.inner_size, -1)
        self.down = weights.take(expert_names(layer, experts.count, "down")).view(experts.count, -1, experts.inner_size)

    def __call__(self, hidden: Tensor) -> Tensor:
        picked, shares = pick_experts(F.linear(hidden, self.router), self.experts)
        out = torch.zeros_like(hidden)
        for expert in picked.unique().tolist():  # type: ignore[no-untyped-call]
            rows, places = torch.where(picked == expert)
            gate, up = F.linear(hidden[rows], self.gate_up[expert]).chunk(2, -1)
            answer = F.linear(F.silu(gate) * up, self.down[expert])
            out.index_add_(0, rows, answer * shares[rows, places, None].to(hidden.dtype))
        return out


def pick_experts(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Of each row of the router's logits [rows, experts]: which ones, and their shares in float32. Both [rows, per_token]."""
    shares, picked = logits.float().softmax(-1).topk(experts.per_token, -1)
    return picked, shares / shares.sum(-1, keepdim=True) if experts.normalised else shares
