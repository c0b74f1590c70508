"""A mixture of experts on the device: route -> gate and up -> down -> combine. Nothing depends on what the router says but the
numbers in memory: so it can be recorded in a graph.

The largest part of the memory is one row of activations for every pair of a row and one of its experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baton.models.config import Experts
from baton.worker.cuda.kernels.fp8_rows import Rows8Bits
from baton.worker.cuda.kernels.grouped_gemm import TILE_LEAST, TILE_MOST, combine, grouped_gemm, tile_for
from baton.worker.cuda.kernels.grouped_gemm_fp8 import TILE_FROM, grouped_gemm_fp8
from baton.worker.cuda.kernels.grouped_gemm_fp8 import TILE_MOST as FP8_TILE_MOST
from baton.worker.cuda.kernels.route import RouteScratch, route
from baton.worker.cuda.kernels.route_row import route_row
from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2
from baton.worker.cuda.weights import LayerWeights, LinearWeights

Product = Callable[[Tensor, Tensor, Tensor], None]
"""x [rows, inputs], weight [outputs, inputs] -> out, float32 [rows, outputs]."""


class ExpertSteps:
    def __init__(
        self,
        experts: Experts,
        rows: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        deterministic: bool,
        fp8: bool = False,
    ) -> None:
        """fp8: of the experts' matrices."""
        self.experts, self.fixed = experts, deterministic
        padded = next_power_of_2(experts.count)  # so that a kernel can clear the counts at once
        self._scratch = RouteScratch(rows, padded, experts.per_token, (TILE_LEAST, TILE_MOST), device)
        self._logits = torch.zeros(rows, experts.count, dtype=torch.float32, device=device)
        pairs = rows * experts.per_token
        self._activated = torch.zeros(pairs, experts.inner_size, dtype=dtype, device=device)
        self._answers = torch.zeros(pairs, hidden, dtype=dtype, device=device)
        self._rows_8_bits: Rows8Bits | None = None
        if fp8 and dtype == torch.bfloat16 and not deterministic:
            self._rows_8_bits = Rows8Bits(pairs, max(experts.inner_size, cdiv(hidden, experts.per_token)), device)

    def run(self, x: Tensor, slots: Tensor, layer: LayerWeights, out: Tensor, product: Product, *, add: bool) -> None:
        """x: [rows, hidden] -> out [rows, hidden], written or added to."""
        if layer.router is None:
            raise ValueError("the layer has no router")
        rows, scratch, experts = len(x), self._scratch, self.experts
        logits = self._logits[:rows]
        product(x, layer.router, logits)
        tile = tile_for(rows, experts.count, experts.per_token, fixed=self.fixed)
        tile = tile if self._rows_8_bits is None else min(tile, FP8_TILE_MOST)
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
        self._product(x, layer.gate_up, activated, tiles, tile, first=True)
        self._product(activated, layer.down, answers, tiles, tile, first=False)
        combine(answers, out, scratch, add=add)

    def _product(self, x: Tensor, of_all: LinearWeights, out: Tensor, tiles: int, tile: int, *, first: bool) -> None:
        weight, scales, rows_8_bits = of_all.weight, of_all.scales, self._rows_8_bits
        if scales is not None and rows_8_bits is not None and tile >= TILE_FROM:
            packed, of_rows = rows_8_bits.rounded(x, scales)
            grouped_gemm_fp8(packed, of_rows, weight, scales, out, self._scratch, tiles, tile, first=first)
        else:
            grouped_gemm(x, weight, out, self._scratch, tiles, tile, first=first, scales=scales)
