"""Decoder layers on the device: one body for any number of rows. The kernel of a product depends on the rows:

one row        gemv.py: norm, activation and the residual's addition are fused
up to 32       skinny_gemm.py: activation and addition are fused
more           cuBLAS, rows in 8 bits, or a fixed order; the addition is fused with the next norm

    norm -> qkv -> (norm of heads) rope_store -> attention -> o -> (norm) -> + -> norm -> gate_up -> act -> down -> (norm) -> +
                                                                                        or route -> experts -> combine
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from baton.models.config import ModelConfig, RopeConfig
from baton.models.ranks import TensorCollective
from baton.models.rotary import RotaryTable
from baton.worker.cuda.experts import ExpertSteps
from baton.worker.cuda.kernels.add_norm import NormWeights, add_norm
from baton.worker.cuda.kernels.attention_decode import FIXED_TUNING, DecodeScratch, DecodeTuning, attend_decode
from baton.worker.cuda.kernels.attention_prefill import attend_prefill
from baton.worker.cuda.kernels.fixed_gemm import FixedScratch, fixed_gemm
from baton.worker.cuda.kernels.fp8 import unpack
from baton.worker.cuda.kernels.fp8_rows import ROWS_ALIGNED, Rows8Bits
from baton.worker.cuda.kernels.gate_rows import add_gated
from baton.worker.cuda.kernels.gated import gated_mul
from baton.worker.cuda.kernels.gemv import gemv
from baton.worker.cuda.kernels.head_rows import norm_head_rows
from baton.worker.cuda.kernels.rope_store import rope_store
from baton.worker.cuda.kernels.skinny_gemm import FP8_ROWS_MAX, SkinnyScratch, skinny_gemm
from baton.worker.cuda.kernels.skinny_gemm import ROWS_MAX as SKINNY_ROWS_MAX
from baton.worker.cuda.step_inputs import StepInputs
from baton.worker.cuda.weights import CudaLayerWeights, DecoderWeights, LinearWeights, RouterWeights

LIBRARY_ROWS = range(49, 97)
"""Row counts for which cublasLt chooses better kernels than cuBLAS: 1.5 % of a step of 64 rows on an H200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    rows: int
    "Maximum of rows per step, prompts and decode together."
    sequences: int
    "Maximum of sequences per step; also the number of slots."
    context_tokens: int
    "Maximum of positions."
    drafts: int = 0
    "Maximum of draft rows per step (speculative decoding)."
    greedy: bool = False
    "Whether all tokens are the likeliest ones, as of a draft model: there is no memory for sampling."

    @property
    def sampled(self) -> int:
        """Maximum of rows that get a token in one step."""
        return min(self.rows, self.sequences + self.drafts)


class ProductInput(NamedTuple):
    """The input of a product."""

    rows: Tensor
    norm: NormWeights | None = None
    "An RMSNorm that the product applies itself, for one row."


class PendingResidual(NamedTuple):
    """Rows still to be added to the residual."""

    rows: Tensor
    norm: NormWeights | None
    "Norm of these rows before the addition."


class LayerSteps:
    """Allocates all memory at creation, so that the same calls can be recorded in a CUDA graph (graphs.py)."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        pool: Tensor,
        limits: StepLimits,
        *,
        deterministic: bool,
        collective: TensorCollective | None = None,
    ) -> None:
        self.config, self.weights, self.pool, self.limits = config, weights, pool, limits
        self.deterministic, self.collective = deterministic, collective
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.pdl = self._gpu = self.device.type == "cuda"
        "Whether programmatic dependent launch is used: a kernel is loaded onto the chip while the one before it ends."
        self._tuning: DecodeTuning = FIXED_TUNING
        rows, sequences, experts = limits.rows, limits.sequences, config.experts
        self._residual, self._normed, self._added = (self._buffer(rows, config.hidden_size) for _ in range(3))
        self._qkv = self._buffer(rows, config.q_size + 2 * config.kv_size)
        self._attended = self._buffer(rows, config.q_size)
        dense = 0 if experts is not None and not experts.layers else config.intermediate_size
        inner = max(dense, 0 if experts is None else experts.shared_size)
        self._gate_up, self._activated = (self._buffer(rows, width).view(-1) for width in (2 * inner, inner))
        self._shared = self._buffer(rows, config.hidden_size if experts is not None and experts.shared_gate else 0)
        self._experts: ExpertSteps | None = None
        if experts is not None:
            fp8 = any(one.weight.dim() == 3 for one in weights.in_fp8())
            given = (experts, rows, config.hidden_size, self.dtype, self.device)
            self._experts = ExpertSteps(
                *given, deterministic=deterministic, fp8=fp8, activation=config.traits.activation, own=config.own_experts
            )
        self.tables = torch.zeros(sequences, -(-limits.context_tokens // pool.shape[4]), dtype=torch.int32, device=self.device)
        "[slots, width] block numbers; written by the executor."
        self._angles = _angles(config, limits.context_tokens, self.device)
        tunings = [FIXED_TUNING] if deterministic else None
        heads = (config.heads, config.kv_heads, config.head_dim)
        self._decode_scratch = DecodeScratch(limits.sampled, *heads, self.device, tunings)
        self._make_products(inner)

    def _buffer(self, count: int, width: int, kind: torch.dtype | None = None) -> Tensor:
        count = -(-count // ROWS_ALIGNED) * ROWS_ALIGNED
        return torch.zeros(count, width, dtype=kind or self.dtype, device=self.device)

    def _make_products(self, inner: int) -> None:
        """Builds the products. inner: width of MLPs without experts."""
        config, rows = self.config, self.limits.rows
        routed = 0 if config.experts is None else config.experts.count
        outputs = max(config.q_size + 2 * config.kv_size, config.hidden_size, 2 * inner, routed)
        self._unpacked = torch.empty(0, dtype=self.dtype, device=self.device)
        "Buffer for the unpacked weights of one product, with fp8."
        self._rows_8_bits: Rows8Bits | None = None
        rows_most = SKINNY_ROWS_MAX
        packed = [one for one in self.weights.in_fp8() if one.weight.dim() == 2]  # experts are never unpacked (grouped_gemm.py)
        if packed:
            rows_most = FP8_ROWS_MAX
            if self._gpu and self.dtype == torch.bfloat16 and not self.deterministic:
                self._rows_8_bits = Rows8Bits(rows, max(config.hidden_size, config.q_size, inner), self.device)
                packed = [one for one in packed if one.scales is not None and not Rows8Bits.takes(one.scales)]
            if rows > rows_most or self.deterministic:
                largest = max((one.weight.numel() for one in packed), default=0)
                self._unpacked = torch.empty(largest, dtype=self.dtype, device=self.device)
        self._skinny_scratch = SkinnyScratch(outputs, self.device, rows_most)
        self._fixed_scratch = FixedScratch(outputs if self.deterministic else 1, self.device)

    # The layers

    def _run_layers(self, inputs: StepInputs, residual: Tensor) -> Tensor | None:
        """Returns the rows still to be added to the residual."""
        pending = None
        with _CublasLt() if self._gpu and len(residual) in LIBRARY_ROWS else nullcontext():
            for number, layer in enumerate(self.weights.layers):
                pending = self._layer(number, layer, inputs, residual, pending)
        if pending is not None and pending.norm is not None:
            self._settle(residual, pending)
            return None
        return None if pending is None else pending.rows

    def _layer(
        self, number: int, layer: CudaLayerWeights, inputs: StepInputs, residual: Tensor, pending: PendingResidual | None
    ) -> PendingResidual | None:
        """Queues one decoder layer. `pending`: rows of the layer before, still to be added. Returns those of this layer; None:
        none."""
        rows = len(residual)
        qkv, attended = self._qkv[:rows], self._attended[:rows]
        x = self._normed_rows(residual, pending, layer.attention_norm)
        self._product(x, layer.qkv, qkv)
        self._attention(number, layer, inputs, qkv, attended)
        pending = self._added_by(ProductInput(attended), layer.output, residual, layer.attention_post_norm)
        if not self.config.traits.parallel:
            x = self._normed_rows(residual, pending, layer.mlp_norm)
        elif pending is not None:
            self._settle(residual, pending)
        if layer.router is not None:
            return self._mixture(x, layer, layer.router, inputs, residual)
        activated = self._gated(x, layer.gate_up)
        return self._added_by(ProductInput(activated), layer.down, residual, layer.mlp_post_norm)

    def _mixture(
        self, x: ProductInput, layer: CudaLayerWeights, router: RouterWeights, inputs: StepInputs, residual: Tensor
    ) -> PendingResidual | None:
        """The mixture of experts of a layer in place of its MLP. Adds to the residual, or returns the rows still to be
        added."""
        if self._experts is None:
            raise ValueError("a layer with a router in a model without experts")
        rows, eps, post = len(residual), self.config.norm_eps, layer.mlp_post_norm
        if x.norm is None:
            routed = self._experts.route(x.rows, inputs.row_slots, router, self._float_product)
        else:
            routed = self._experts.route_row(x.rows, x.norm, eps, router, self._normed[:1])
        add = self._adds_itself(rows, post)
        out, pending = (residual, None) if add else (self._added[:rows], PendingResidual(self._added[:rows], post))
        if router.shared is not None:
            activated = ProductInput(self._gated(ProductInput(routed.x), router.shared.gate_up))
            if router.shared_gate is None:
                self._product(activated, router.shared.down, out, residual=out if add else None)
            else:
                self._product(activated, router.shared.down, self._shared[:rows])
                add_gated(routed.x, router.shared_gate, self._shared[:rows], out, add=add)
        self._experts.run(routed, layer, out, add=add or router.shared is not None)
        if self.collective is not None:
            self.collective.sum(out)
        return pending

    def _attention(self, number: int, layer: CudaLayerWeights, inputs: StepInputs, qkv: Tensor, out: Tensor) -> None:
        """Stores keys and values of the rows in the pool, then attends: `out` gets the attended rows. Queries in `qkv` are
        rotated in place."""
        config, tables, norms = self.config, self.tables, layer.head_norms
        window, heads, scale = config.window(number), config.heads, config.attention_scale
        if norms is not None and config.traits.qk_norm_across_heads:
            norm_head_rows(qkv, norms, config.norm_eps)
            norms = None
        rope_store(
            *(qkv, norms, config.norm_eps, self._angles[config.layer_rope(number)], inputs.positions, inputs.row_slots),
            *(tables, self.pool, number),
            heads=heads,
            pdl=self._uses_pdl(len(qkv)),
        )
        if inputs.tiles is not None and len(inputs.tiles):
            if inputs.slots is None or inputs.starts is None or inputs.contexts is None:
                raise ValueError("tiles need slots, starts and contexts")
            attend_prefill(
                *(qkv, self.pool, number, tables, inputs.slots, inputs.starts, inputs.contexts, inputs.tiles, out),
                heads=heads,
                scale=scale,
                window=window,
                sinks=layer.sinks,
                fixed=self.deterministic,
            )
        # Decoded rows come after the prompts: a tile may span decoded rows (StepBatch.of_prompt), and their results must win.
        for some in torch.split(inputs.order, self.limits.sampled) if len(inputs.order) else ():
            attend_decode(
                *(qkv, self.pool, number, tables, inputs.row_slots, inputs.positions),
                *(None if len(qkv) == 1 else some, inputs.split_tokens, self._decode_scratch, out),
                heads=heads,
                scale=scale,
                window=window,
                sinks=layer.sinks,
                tuning=self._tuning,
                # The sizes do not depend on the rest of the step, so a step with prompts uses the kernels compiled for the
                # graphs.
                pdl=self._uses_pdl(len(inputs.order)),
                fixed=self.deterministic,
            )

    # Norms and sums

    def _is_narrow(self, rows: int) -> bool:
        return rows <= SKINNY_ROWS_MAX and not self.deterministic

    def _adds_itself(self, rows: int, post: NormWeights | None) -> bool:
        """Whether products add to the residual themselves: what they add is neither normed nor summed over ranks first."""
        return self._is_narrow(rows) and post is None and self.collective is None

    def _uses_pdl(self, rows: int) -> bool:
        return self.pdl and self._is_narrow(rows)

    def _normed_rows(self, residual: Tensor, pending: PendingResidual | None, norm: NormWeights | None) -> ProductInput:
        """Adds the pending rows. If attention and MLP read the same rows these are stored: the residual changes in between."""
        rows, traits = len(residual), self.config.traits
        if pending is None and norm is None:
            return ProductInput(residual)
        inside = rows == 1 and self._is_narrow(1) and not traits.parallel
        if pending is None and norm is not None and inside and not norm.centred:
            return ProductInput(residual, norm)
        normed, (added, post) = self._normed[:rows], pending or (None, None)
        add_norm(residual, added, norm, self.config.norm_eps, normed, post=post, pdl=self._uses_pdl(rows))
        return ProductInput(residual if norm is None else normed)

    def _settle(self, residual: Tensor, pending: PendingResidual) -> None:
        add_norm(residual, pending.rows, None, self.config.norm_eps, residual, post=pending.norm)

    def _added_by(
        self, x: ProductInput, linear: LinearWeights, residual: Tensor, post: NormWeights | None
    ) -> PendingResidual | None:
        """residual += norm(x @ linear); or returns the rows still to be added."""
        if self._adds_itself(len(residual), post):
            self._product(x, linear, residual, residual=residual)
            return None
        added = self._added[: len(residual)]
        self._product(x, linear, added)
        if self.collective is not None:
            self.collective.sum(added)
        return PendingResidual(added, post)

    # Products

    def _gated(self, x: ProductInput, gate_up: LinearWeights) -> Tensor:
        """The activated product act(gate) * up, valid until the next call."""
        rows, width = len(x.rows), len(gate_up.weight) // 2
        activated = self._activated[: rows * width].view(rows, width)
        if self._is_narrow(rows):
            self._product(x, gate_up, activated, paired=True)
        else:
            both = self._gate_up[: rows * 2 * width].view(rows, 2 * width)
            self._large_product(x.rows, gate_up, both)
            gated_mul(both, activated, self.config.traits.activation)
        return activated

    def _product(
        self, x: ProductInput, linear: LinearWeights, out: Tensor, *, residual: Tensor | None = None, paired: bool = False
    ) -> None:
        """One product. residual, paired: only for up to 32 rows."""
        rows, activation, norm = len(out), self.config.traits.activation, None if x.norm is None else x.norm.weight
        if not self._is_narrow(rows):
            self._large_product(x.rows, linear, out)
        elif rows == 1:
            gemv(
                *(x.rows, linear.weight, out),
                scales=linear.scales,
                bias=linear.bias,
                norm=norm,
                eps=self.config.norm_eps,
                residual=residual,
                paired=paired,
                activation=activation,
                pdl=self.pdl,
            )
        else:
            skinny_gemm(
                *(x.rows, linear.weight, out, self._skinny_scratch),
                scales=linear.scales,
                bias=linear.bias,
                residual=residual,
                paired=paired,
                activation=activation,
                pdl=self.pdl,
            )

    def _large_product(self, x: Tensor, linear: LinearWeights, out: Tensor) -> None:
        """A product by the tensor cores: in 8 bits, in a fixed order, or by the library. out = x @ weight.t() + bias."""
        weight = linear.weight
        if linear.scales is not None:
            rows_8_bits = self._rows_8_bits
            if rows_8_bits is not None and len(x) > SKINNY_ROWS_MAX and rows_8_bits.takes(linear.scales):
                rows_8_bits.product(x, weight, linear.scales, out, linear.bias)
                return
            if len(x) <= FP8_ROWS_MAX and not self.deterministic:
                skinny_gemm(x, weight, out, self._skinny_scratch, scales=linear.scales, bias=linear.bias)
                return
            weight = self._unpacked[: weight.numel()].view(weight.shape)
            unpack(linear.weight, linear.scales, weight)
        if self.deterministic:
            fixed_gemm(x, weight, out, self._fixed_scratch, linear.bias)
        elif linear.bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(linear.bias, x, weight.t(), out=out)

    def _float_product(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        if self.deterministic:
            fixed_gemm(x, weight, out, self._fixed_scratch)
        elif len(x) <= SKINNY_ROWS_MAX:
            skinny_gemm(x, weight, out, self._skinny_scratch)
        elif x.dtype == out.dtype:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


class _CublasLt:
    def __enter__(self) -> None:
        torch.backends.cuda.preferred_blas_library("cublaslt")

    def __exit__(self, *error: object) -> None:
        torch.backends.cuda.preferred_blas_library("default")


def _angles(config: ModelConfig, positions: int, device: torch.device) -> dict[RopeConfig, tuple[Tensor, Tensor]]:
    """Cosines and sines of every rotary setting of the layers."""
    found = {}
    for rope in {config.layer_rope(layer): None for layer in range(config.layers)}:
        table = RotaryTable(rope, config.head_dim, positions)
        found[rope] = torch.from_numpy(table.cosines).to(device), torch.from_numpy(table.sines).to(device)
    return found
