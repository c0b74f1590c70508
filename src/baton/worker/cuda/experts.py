"""A mixture of experts on the device: route -> gate and up -> down -> combine. Nothing depends on what the router says but the
numbers in memory: so it can be recorded in a graph.

The largest part of the memory is one row of activations for every pair of a row and one of its experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baton.models.config import Experts
from baton.worker.cuda.kernels.grouped_gemm import TILE_LEAST, TILE_MOST, combine, grouped_gemm, tile_for
from baton.worker.cuda.kernels.route import RouteScratch, route
from baton.worker.cuda.kernels.route_row import route_row
from baton.worker.cuda.kernels.sizes import next_power_of_2
from baton.worker.cuda.weights import LayerWeights

Product = Callable[[Tensor, Tensor, Tensor], None]
"""x [rows, inputs], weight [outputs, inputs] -> out, float32 [rows, outputs]."""


class ExpertSteps:
    def __init__(
        self, experts: Experts, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, *, deterministic: bool
    ) -> None:
        self.experts, self.fixed = experts, deterministic
        padded = next_power_of_2(experts.count)  # so that a kernel can clear the counts at once
        self._scratch = RouteScratch(rows, padded, experts.per_token, (TILE_LEAST, TILE_MOST), device)
        self._logits = torch.zeros(rows, experts.count, dtype=torch.float32, device=device)
        pairs = rows * experts.per_token
        self._activated = torch.zeros(pairs, experts.inner_size, dtype=dtype, device=device)
        self._answers = torch.zeros(pairs, hidden, dtype=dtype, device=device)

    def run(self, x: Tensor, slots: Tensor, layer: LayerWeights, out: Tensor, product: Product, *, add: bool) -> None:
        """x: [rows, hidden] -> out [rows, hidden], written or added to."""
        if layer.router is None:
            raise ValueError("the layer has no router")
        rows, scratch, experts = len(x), self._scratch, self.experts
        logits = self._logits[:rows]
        product(x, layer.router, logits)
        tile = tile_for(rows, experts.count, experts.per_token, fixed=self.fixed)
        tiles = route(logits, slots, scratch, tile, normalised=experts.normalised)
        self._products(x, layer, tiles, tile, out, add=add)

    def run_row(self, residual: Tensor, eps: float, layer: LayerWeights, normed: Tensor) -> None:
        """residual: [1, hidden], before the norm; the experts' answers are added to it. normed: [1, hidden], scratch."""
        if layer.router is None:
            raise ValueError("the layer has no router")
        given = (residual, layer.mlp_norm, eps, layer.router, self._logits[:1], normed, self._scratch, TILE_LEAST)
        tiles = route_row(*given, normalised=self.experts.normalised)
        self._products(normed, layer, tiles, TILE_LEAST, residual, add=True)

    def _products(self, x: Tensor, layer: LayerWeights, tiles: int, tile: int, out: Tensor, *, add: bool) -> None:
        scratch, pairs = self._scratch, len(x) * self.experts.per_token
        activated, answers = self._activated[:pairs], self._answers[:pairs]
        first, second = layer.gate_up, layer.down
        grouped_gemm(x, first.weight, activated, scratch, tiles, tile, first=True, scales=first.scales)
        grouped_gemm(activated, second.weight, answers, scratch, tiles, tile, first=False, scales=second.scales)
        combine(answers, out, scratch, add=add)
