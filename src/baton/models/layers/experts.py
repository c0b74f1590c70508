"""A mixture of experts: each row is sent to the few experts with the highest router scores, and their outputs are added by
shares.

Computed expert by expert with its rows: the simple version, and the oracle of grouped kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.config import Activation, Experts
from baton.models.layers.linear import Linear
from baton.models.layers.mlp import MLP
from baton.models.torch_weights import Weights


class ExpertMixture:
    __slots__ = ("correction", "experts", "mlps", "own", "router", "shared", "shared_gate")

    def __init__(
        self, experts: Experts, weights: Weights, layer: int, activation: Activation = "silu", own: range | None = None
    ) -> None:
        """`own`: the experts of this rank. None: all."""
        self.experts = experts
        self.own = range(experts.count) if own is None else own
        prefix = f"layers.{layer}.mlp."
        self.router = Linear.load(weights, [f"{prefix}router"], bias=experts.bias)
        self.correction = weights.take([f"{prefix}router.correction"]).float() if experts.correction else None

        def mlp(name: str, width: int, bias: bool = False) -> MLP:
            return MLP(weights, f"{prefix}{name}.", width, bias=bias, activation=activation)

        self.shared = mlp("shared", experts.shared_size) if experts.shared_size else None
        self.shared_gate = weights.take([f"{prefix}shared_gate.weight"]) if experts.shared_gate else None
        self.mlps = [mlp(f"experts.{expert}", experts.inner_size, experts.bias) for expert in self.own]

    def __call__(self, hidden: Tensor) -> Tensor:
        picked, shares = pick_experts(self.router(hidden), self.experts, self.correction)
        out = self._shared(hidden)
        for expert in picked.unique().tolist():  # type: ignore[no-untyped-call]
            if expert not in self.own:
                continue
            rows, places = torch.where(picked == expert)
            answer = self.mlps[expert - self.own.start](hidden[rows])
            out.index_add_(0, rows, answer * shares[rows, places, None].to(hidden.dtype))
        return out

    def linears(self) -> list[Linear]:
        mlps = self.mlps if self.shared is None else [*self.mlps, self.shared]
        return [linear for mlp in mlps for linear in mlp.linears()]

    def _shared(self, hidden: Tensor) -> Tensor:
        """The output of the shared expert, for every row."""
        if self.shared is None:
            return torch.zeros_like(hidden)
        answer = self.shared(hidden)
        return answer if self.shared_gate is None else answer.mul_(F.linear(hidden, self.shared_gate).sigmoid())


def pick_experts(logits: Tensor, experts: Experts, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Picked experts and their float32 shares, both [rows, per_token], for each row of the router's logits [rows, experts]."""
    all_shares = logits.float().softmax(-1) if experts.scoring == "softmax" else logits.float().sigmoid()
    picked = (all_shares if correction is None else all_shares + correction).topk(experts.per_token, -1).indices
    shares = all_shares.gather(-1, picked)
    if experts.normalised:
        shares = shares / shares.sum(-1, keepdim=True)
    return picked, shares * experts.scale
