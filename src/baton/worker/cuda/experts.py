"""A mixture of experts on the device: route -> gate and up -> down -> combine.

Launches do not depend on the router's results, only numbers in memory do: so the steps can be recorded in a graph. Most of the
memory is one row of activations per pair of a row and one of its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from baton.models.config import Activation, Experts
from baton.worker.cuda.kernels.add_norm import NormWeights
from baton.worker.cuda.kernels.fp8_rows import Rows8Bits
from baton.worker.cuda.kernels.grouped_gemm import TILE_LEAST, TILE_MOST, combine, grouped_gemm, tile_for
from baton.worker.cuda.kernels.grouped_gemm_fp8 import TILE_FROM, grouped_gemm_fp8
from baton.worker.cuda.kernels.grouped_gemm_fp8 import TILE_MOST as FP8_TILE_MOST
from baton.worker.cuda.kernels.grouped_gemm_mxfp4 import grouped_gemm_mxfp4
from baton.worker.cuda.kernels.route import Picking, RouteScratch, route
from baton.worker.cuda.kernels.route_row import route_row
from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2
from baton.worker.cuda.weights import CudaLayerWeights, LinearWeights, RouterWeights

Product = Callable[[Tensor, Tensor, Tensor], None]
"""A product: x [rows, inputs], weight [outputs, inputs] -> out, float32 [rows, outputs]."""


class Routed(NamedTuple):
    """Rows whose experts are in the scratch."""

    x: Tensor
    "[rows, hidden], the normalised input of the experts."
    tiles: int
    tile: int
    "Rows per tile."


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
        activation: Activation = "silu",
        own: range | None = None,
    ) -> None:
        """fp8: the experts' matrices are in fp8. own: the experts of this rank; None: all."""
        self._own = None if own is None or len(own) == experts.count else own
        self.experts, self.fixed, self.activation = experts, deterministic, activation
        padded = next_power_of_2(experts.count)  # adjacent, so that one kernel clears all counts
        self._scratch = RouteScratch(rows, padded, experts.per_token, (TILE_LEAST, TILE_MOST), device)
        self._logits = torch.zeros(rows, experts.count, dtype=torch.float32, device=device)
        pairs = rows * experts.per_token
        self._activated = torch.zeros(pairs, experts.inner_size, dtype=dtype, device=device)
        self._answers = torch.zeros(pairs, hidden, dtype=dtype, device=device)
        self._rows_8_bits: Rows8Bits | None = None
        if fp8 and dtype == torch.bfloat16 and not deterministic:
            self._rows_8_bits = Rows8Bits(pairs, max(experts.inner_size, cdiv(hidden, experts.per_token)), device)

    def route(self, x: Tensor, slots: Tensor, router: RouterWeights, product: Product) -> Routed:
        """Choose experts for these rows. x: [rows, hidden], normalised; slots: int32 [rows], -1: padding."""
        rows, experts = len(x), self.experts
        logits = self._logits[:rows]
        product(x, router.weight, logits)
        tile = tile_for(rows, experts.count, experts.per_token, fixed=self.fixed)
        tile = tile if self._rows_8_bits is None else min(tile, FP8_TILE_MOST)
        return Routed(x, route(logits, slots, self._scratch, tile, self._picking(router)), tile)

    def route_row(self, residual: Tensor, norm: NormWeights, eps: float, router: RouterWeights, normed: Tensor) -> Routed:
        """Normalise one row and choose its experts. residual: [1, hidden], before the norm, an RMSNorm -> normed [1,
        hidden]."""
        given = (residual, norm.weight, eps, router.weight, self._logits[:1], normed, self._scratch, TILE_LEAST)
        return Routed(normed, route_row(*given, self._picking(router)), TILE_LEAST)

    def run(self, routed: Routed, layer: CudaLayerWeights, out: Tensor, *, add: bool) -> None:
        """Compute the chosen experts -> out [rows, hidden], written or added to."""
        scratch, pairs = self._scratch, len(routed.x) * self.experts.per_token
        activated, answers = self._activated[:pairs], self._answers[:pairs]
        self._product(routed.x, layer.gate_up, activated, routed, first=True)
        self._product(activated, layer.down, answers, routed, first=False)
        combine(answers, out, scratch, add=add, partly=self._own is not None)

    def _picking(self, router: RouterWeights) -> Picking:
        return Picking(self.experts, router.bias, router.correction, self._own)

    def _product(self, x: Tensor, of_all: LinearWeights, out: Tensor, routed: Routed, *, first: bool) -> None:
        weight, scales, rows_8_bits = of_all.weight, of_all.scales, self._rows_8_bits
        tiles, bias, activation = (self._scratch, routed.tiles, routed.tile), of_all.bias, self.activation
        if of_all.exponents is not None:
            grouped_gemm_mxfp4(x, weight, of_all.exponents, out, *tiles, first=first, bias=bias, activation=activation)
        elif scales is not None and rows_8_bits is not None and routed.tile >= TILE_FROM:
            packed, of_rows = rows_8_bits.rounded(x, scales)
            grouped_gemm_fp8(packed, of_rows, weight, scales, out, *tiles, first=first, bias=bias, activation=activation)
        else:
            grouped_gemm(x, weight, out, *tiles, first=first, scales=scales, bias=bias, activation=activation)
