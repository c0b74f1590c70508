"""One forward pass over a flat batch on the device, and a token for every sequence that is due. Nothing waits for the host.

embed -> layers -> last norm (due rows) -> head -> (adjusted logits) -> likeliest -> (draws, log-probabilities)
          |
          add_norm, qkv, rope_store, attention, o, add_norm, gate_up, silu_mul, down            with cuBLAS's products
          norm, qkv, rope_store, attention, o+residual, norm, gate_up+silu_mul, down+residual   up to 32 rows
          norm+qkv, rope_store, attention, o+residual, norm+gate_up+silu_mul, down+residual     one row

All memory is allocated when this is made. So the same calls can be recorded in a CUDA graph (graphs.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.rotary import RotaryTable
from baton.worker.cuda.adjustments import Adjustments
from baton.worker.cuda.columns import SlotColumns
from baton.worker.cuda.experts import ExpertSteps
from baton.worker.cuda.kernels.add_norm import add_norm
from baton.worker.cuda.kernels.adjust import adjust, tally
from baton.worker.cuda.kernels.argmax import argmax
from baton.worker.cuda.kernels.attention_decode import FIXED_TUNING, DecodeScratch, DecodeTuning, attend_decode, tuning_for
from baton.worker.cuda.kernels.attention_prefill import attend_prefill, rows_per_tile
from baton.worker.cuda.kernels.embed import embed
from baton.worker.cuda.kernels.fixed_gemm import FixedScratch, fixed_gemm
from baton.worker.cuda.kernels.fp8 import unpack
from baton.worker.cuda.kernels.fp8_rows import ROWS_ALIGNED, Rows8Bits
from baton.worker.cuda.kernels.gemv import gemv
from baton.worker.cuda.kernels.judge import judge
from baton.worker.cuda.kernels.pool_rows import pool_rows
from baton.worker.cuda.kernels.rope_store import rope_store
from baton.worker.cuda.kernels.sample import SampleScratch, sample
from baton.worker.cuda.kernels.silu_mul import silu_mul
from baton.worker.cuda.kernels.skinny_gemm import FP8_ROWS_MAX, SkinnyScratch, skinny_gemm
from baton.worker.cuda.kernels.skinny_gemm import ROWS_MAX as SKINNY_ROWS_MAX
from baton.worker.cuda.kernels.tell import tell
from baton.worker.cuda.step_inputs import StepInputs
from baton.worker.cuda.weights import DecoderWeights, LayerWeights, LinearWeights
from baton.worker.pooling import LARGEST, STEPS_PER_ONE

Hidden = tuple[Tensor, Tensor | None]
"""Rows, and what is still to be added to them."""
LIBRARY_ROWS = range(49, 97)
"""For so many rows cublasLt chooses better kernels than cuBLAS does: 1.5 % of a step of 64 rows on an H200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    rows: int
    "Of one step, prompts and decode together."
    sequences: int
    "Of one step; as many slots there are."
    context_tokens: int
    "Positions go up to this."


class DecoderStep:
    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        pool: Tensor,
        limits: StepLimits,
        *,
        deterministic: bool = False,
    ) -> None:
        """pool: [blocks, layers, 2, kv_heads, block_size, head_dim]. deterministic: the bits of a row do not depend on the
        other rows of a step."""
        self.config, self.weights, self.pool, self.limits = config, weights, pool, limits
        self.deterministic = deterministic
        self.rows_per_tile = rows_per_tile(config.heads, config.kv_heads)
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self.pdl = self._gpu = device.type == "cuda"
        "Programmatic dependent launch: a kernel is brought onto the chip while the one before it ends."
        self._tuning: DecodeTuning = FIXED_TUNING
        self.last_hidden: Hidden = torch.empty(0), None
        "Of the last step with prompts: all rows, and what is to be added to them. Who replays it as a graph says so here."
        rows, sequences, block_size = limits.rows, limits.sequences, pool.shape[4]

        def buffer(count: int, width: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(-(-count // ROWS_ALIGNED) * ROWS_ALIGNED, width, dtype=kind, device=device)

        def column(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._residual, self._normed, self._added = (buffer(rows, config.hidden_size) for _ in range(3))
        self._qkv = buffer(rows, config.q_size + 2 * config.kv_size)
        self._attended = buffer(rows, config.q_size)
        self._experts: ExpertSteps | None = None
        inner = config.intermediate_size
        if config.experts is not None:
            given = (config.experts, rows, config.hidden_size, dtype, device)
            fp8 = any(one.weight.dim() == 3 for one in weights.in_fp8())
            self._experts, inner = ExpertSteps(*given, deterministic=deterministic, fp8=fp8), 0
        self._gate_up, self._activated = buffer(rows, 2 * inner), buffer(rows, inner)
        self._logits = buffer(sequences, config.vocab_size, torch.float32)
        self._tokens, self._broken = column(sequences), column(rows)
        self.tables = torch.zeros(sequences, -(-limits.context_tokens // block_size), dtype=torch.int32, device=device)
        "[slots, width] block numbers; whoever plans writes them."
        self.last_tokens = column(sequences)
        "[slots] what each sampled last."
        self.columns = SlotColumns(sequences, config.vocab_size, device)
        self.adjustments = Adjustments(self.columns.adjust, rows)
        self._angles = _angles(config, limits.context_tokens, device)
        tunings = [FIXED_TUNING] if deterministic else None
        self._decode_scratch = DecodeScratch(sequences, config.heads, config.kv_heads, config.head_dim, device, tunings)
        outputs = max(config.q_size + 2 * config.kv_size, config.hidden_size, 2 * inner)
        self._unpacked = torch.empty(0, dtype=dtype, device=device)
        "Where the weights of one product are unpacked, with fp8."
        self._rows_8_bits: Rows8Bits | None = None
        rows_most = SKINNY_ROWS_MAX
        packed = [one for one in weights.in_fp8() if one.weight.dim() == 2]  # experts are never unpacked (grouped_gemm.py)
        if packed:
            rows_most = FP8_ROWS_MAX
            if self._gpu and dtype == torch.bfloat16 and not deterministic:
                self._rows_8_bits = Rows8Bits(rows, max(config.hidden_size, config.q_size, inner), device)
                packed = [one for one in packed if one.scales is not None and not Rows8Bits.takes(one.scales)]
            if rows > rows_most or deterministic:
                largest = max((one.weight.numel() for one in packed), default=0)
                self._unpacked = torch.empty(largest, dtype=dtype, device=device)
        self._skinny_scratch = SkinnyScratch(outputs, device, rows_most)
        self._fixed_scratch = FixedScratch(outputs if deterministic else 1, device)
        self._sample_scratch = SampleScratch(sequences, config.vocab_size, device)
        self._row_scales = torch.zeros(rows, dtype=torch.float32, device=device)
        self._pooled = torch.zeros(sequences, config.hidden_size, dtype=torch.int64, device=device)

    def run(self, inputs: StepInputs, *, draws: bool = True, even: bool = False) -> None:
        """Queues the step. `logits`, `tokens` and `broken` are there when the stream gets to it.

        draws: not all want just their likeliest token. even: all that are decoded are about equally long.
        """
        self.run_layers(inputs, even=even)
        self.choose_tokens(inputs, draws=draws)

    def run_layers(self, inputs: StepInputs, *, even: bool) -> None:
        self._tuning = FIXED_TUNING if self.deterministic else tuning_for(len(inputs.order), self.config.kv_heads, even=even)
        rows = len(inputs.token_ids)
        residual = self._residual[:rows]
        embed(inputs.token_ids, inputs.row_slots, self.last_tokens, self.weights.embedding, residual)
        if rows == 1 and not self.deterministic:
            self._layers_of_one_row(inputs, residual)
            added: Tensor | None = None
        else:
            added = self._layers(inputs, residual)
        self.last_hidden = residual, added
        if inputs.tiles is not None:
            judge(residual, added, self._broken[:rows])

    def choose_tokens(self, inputs: StepInputs, *, draws: bool) -> None:
        """After run_layers. For who is due."""
        due, eps, (residual, added) = len(inputs.due_slots), self.config.norm_eps, self.last_hidden
        if not due:
            return
        if len(residual) == 1 and not self.deterministic:
            gemv(residual, self.weights.head, self._logits[:1], norm=self.weights.final_norm, eps=eps, pdl=self.pdl)
        else:
            normed = self._normed[:due]
            add_norm(residual, added, self.weights.final_norm, eps, normed, inputs.due_rows)
            self._head(normed, self._logits[:due])
        self._choose(inputs, draws)

    def _layers(self, inputs: StepInputs, residual: Tensor) -> Tensor | None:
        """What is still to be added to the residual."""
        rows, added = len(residual), None
        skinny = rows <= SKINNY_ROWS_MAX and not self.deterministic
        if rows in LIBRARY_ROWS and self._gpu:
            torch.backends.cuda.preferred_blas_library("cublaslt")
        for number, layer in enumerate(self.weights.layers):
            if skinny:
                self._skinny_layer(number, layer, inputs, residual)
            else:
                added = self._layer(number, layer, inputs, residual, added)
        if rows in LIBRARY_ROWS and self._gpu:
            torch.backends.cuda.preferred_blas_library("default")
        return added

    def logits(self, due: int) -> Tensor:
        """float32 [due, vocabulary] of the last step, as adjusted."""
        return self._logits[:due]

    def tell_prompts(self, rows: Tensor, tokens: Tensor, told: Tensor) -> None:
        """What the model thought of these tokens, each after its row of the last step, which had prompts (PromptRows).
        `prompts_told` is there when the stream gets to it."""
        kept = self.adjustments
        residual, added = self.last_hidden
        for at in range(0, len(rows), len(kept.raw)):
            part = slice(at, min(at + len(kept.raw), len(rows)))
            count = part.stop - part.start
            normed, logits = self._normed[:count], kept.raw[:count]
            add_norm(residual, added, self.weights.final_norm, self.config.norm_eps, normed, rows[part])
            self._head(normed, logits)
            tell(
                *(logits, logits, kept.nothing_adjusted, kept.every_row[:count], tokens[part], told[part]),
                *(kept.scratch, kept.prompts_told[part]),
            )

    def pool_rows(self, ranges: Tensor) -> Tensor:
        """int64 [ranges, hidden]: sums of rows of the last step, which had prompts (StepBatch.pooled), after the last norm."""
        residual, added = self.last_hidden
        sums = self._pooled[: len(ranges)]
        pool_rows(
            *(residual, added, self.weights.final_norm, self.config.norm_eps, ranges, self._row_scales, sums),
            steps_per_one=STEPS_PER_ONE,
            largest=LARGEST,
        )
        return sums

    def tokens(self, due: int) -> Tensor:
        """int32 [due] of the last step: argmax.NOT_FINITE_ID or NOTHING_LEFT_ID for a row that failed."""
        return self._tokens[:due]

    def broken(self, rows: int) -> Tensor:
        """int32 [rows] of the last step with prompts: 1 for a row with a number that is none."""
        return self._broken[:rows]

    def _layer(self, number: int, layer: LayerWeights, inputs: StepInputs, residual: Tensor, added: Tensor | None) -> Tensor:
        rows, eps = len(residual), self.config.norm_eps
        normed, qkv, attended = self._normed[:rows], self._qkv[:rows], self._attended[:rows]
        gate_up, activated = self._gate_up[:rows], self._activated[:rows]
        add_norm(residual, added, layer.attention_norm, eps, normed)
        self._linear(normed, layer.qkv, qkv)
        self._attention(number, layer, inputs, qkv, attended)
        added = self._added[:rows]
        self._linear(attended, layer.output, added)
        add_norm(residual, added, layer.mlp_norm, eps, normed)
        if self._experts is not None:
            self._experts.run(normed, inputs.row_slots, layer, added, self._float_product, add=False)
            return added
        self._linear(normed, layer.gate_up, gate_up)
        silu_mul(gate_up, activated)
        self._linear(activated, layer.down, added)
        return added

    def _skinny_layer(self, number: int, layer: LayerWeights, inputs: StepInputs, residual: Tensor) -> None:
        rows, eps, scratch, pdl = len(residual), self.config.norm_eps, self._skinny_scratch, self.pdl
        normed, qkv, attended, activated = (x[:rows] for x in (self._normed, self._qkv, self._attended, self._activated))
        add_norm(residual, None, layer.attention_norm, eps, normed, pdl=pdl)
        skinny_gemm(normed, layer.qkv.weight, qkv, scratch, scales=layer.qkv.scales, bias=layer.qkv.bias, pdl=pdl)
        self._attention(number, layer, inputs, qkv, attended, pdl=pdl)
        out, down, up = layer.output, layer.down, layer.gate_up
        skinny_gemm(attended, out.weight, residual, scratch, scales=out.scales, bias=out.bias, residual=residual, pdl=pdl)
        add_norm(residual, None, layer.mlp_norm, eps, normed, pdl=pdl)
        if self._experts is not None:
            self._experts.run(normed, inputs.row_slots, layer, residual, self._float_product, add=True)
            return
        skinny_gemm(normed, up.weight, activated, scratch, scales=up.scales, bias=up.bias, paired=True, pdl=pdl)
        skinny_gemm(activated, down.weight, residual, scratch, scales=down.scales, bias=down.bias, residual=residual, pdl=pdl)

    def _attention(
        self, number: int, layer: LayerWeights, inputs: StepInputs, qkv: Tensor, out: Tensor, *, pdl: bool = False
    ) -> None:
        config, tables = self.config, self.tables
        window, heads, scale = config.window(number), config.heads, config.attention_scale
        rope_store(
            *(qkv, layer.head_norms, config.norm_eps, self._angles, inputs.positions, inputs.row_slots),
            *(tables, self.pool, number),
            heads=heads,
            pdl=pdl,
        )
        if inputs.tiles is not None and len(inputs.tiles):
            if inputs.slots is None or inputs.starts is None or inputs.contexts is None:
                raise ValueError("tiles need slots, starts and contexts")
            attend_prefill(
                *(qkv, self.pool, number, tables, inputs.slots, inputs.starts, inputs.contexts, inputs.tiles, out),
                heads=heads,
                scale=scale,
                window=window,
                fixed=self.deterministic,
            )
        # After the prompts: a tile may reach into rows that are decoded (StepBatch.of_prompt), and these are to win.
        for some in torch.split(inputs.order, self.limits.sequences) if len(inputs.order) else ():
            attend_decode(
                *(qkv, self.pool, number, tables, inputs.row_slots, inputs.positions),
                *(None if len(qkv) == 1 else some, inputs.split_tokens, self._decode_scratch, out),
                heads=heads,
                scale=scale,
                window=window,
                tuning=self._tuning,
                # Whatever else is in the step: so a step with prompts finds compiled what the graphs use.
                pdl=self.pdl and len(inputs.order) <= SKINNY_ROWS_MAX and not self.deterministic,
                fixed=self.deterministic,
            )

    def _layers_of_one_row(self, inputs: StepInputs, residual: Tensor) -> None:
        """Six kernels per layer: all that is not attention is inside the products."""
        eps, weights, pdl = self.config.norm_eps, self.weights, self.pdl
        qkv, attended, activated = self._qkv[:1], self._attended[:1], self._activated[:1]
        for number, layer in enumerate(weights.layers):
            out, down, up = layer.output, layer.down, layer.gate_up
            first, norm = layer.qkv, layer.attention_norm
            gemv(residual, first.weight, qkv, scales=first.scales, bias=first.bias, norm=norm, eps=eps, pdl=pdl)
            self._attention(number, layer, inputs, qkv, attended, pdl=pdl)
            gemv(attended, out.weight, residual, scales=out.scales, bias=out.bias, residual=residual, pdl=pdl)
            if self._experts is not None:
                self._experts.run_row(residual, eps, layer, self._normed[:1])
                continue
            norm = layer.mlp_norm
            gemv(residual, up.weight, activated, scales=up.scales, bias=up.bias, norm=norm, eps=eps, paired=True, pdl=pdl)
            gemv(activated, down.weight, residual, scales=down.scales, bias=down.bias, residual=residual, pdl=pdl)

    def _choose(self, inputs: StepInputs, draws: bool) -> None:
        due = len(inputs.due_slots)
        logits, tokens, scratch, slots = self._logits[:due], self._tokens[:due], self._sample_scratch, inputs.due_slots
        if not draws:
            argmax(logits, slots, scratch.argmax, tokens, self.last_tokens)
            return
        kept = self.adjustments
        columns, adjusted = kept.columns, kept.rows.adjusted
        adjust(logits, kept.raw, slots, self.last_tokens, columns, kept.rows)
        argmax(logits, slots, scratch.argmax, tokens, self.last_tokens, adjusted)
        sample(logits, slots, inputs.outputs, self.columns.draws, scratch, tokens, self.last_tokens)
        tell(logits, kept.raw, adjusted, slots, tokens, columns.told, kept.scratch, kept.told)
        tally(slots, tokens, columns)

    def _linear(self, x: Tensor, linear: LinearWeights, out: Tensor) -> None:
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

    def _head(self, x: Tensor, out: Tensor) -> None:
        """Logits are float32 also where the model is not: rounded to bfloat16 the likeliest tokens would often be equal."""
        self._float_product(x, self.weights.head, out)

    def _float_product(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        if self.deterministic:
            fixed_gemm(x, weight, out, self._fixed_scratch)
        elif len(x) <= SKINNY_ROWS_MAX:
            skinny_gemm(x, weight, out, self._skinny_scratch)
        elif x.dtype == out.dtype:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


def _angles(config: ModelConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    table = RotaryTable(config.rope, config.head_dim, positions)
    return torch.from_numpy(table.cosines).to(device), torch.from_numpy(table.sines).to(device)
