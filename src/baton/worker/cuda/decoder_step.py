"""One forward pass over a flat batch on the device, and a token per due sequence. Nothing waits for the host.

embed -> layers (layer_steps.py) -> last norm (due rows) -> head -> (adjusted logits) -> likeliest -> (draws, log-probabilities)
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.ranks import TensorCollective, gather_logits
from baton.worker.cuda.adjustments import Adjustments
from baton.worker.cuda.columns import SlotColumns
from baton.worker.cuda.kernels.add_norm import add_norm
from baton.worker.cuda.kernels.adjust import adjust, tally
from baton.worker.cuda.kernels.argmax import argmax
from baton.worker.cuda.kernels.attention_decode import FIXED_TUNING, tuning_for
from baton.worker.cuda.kernels.attention_prefill import rows_per_tile
from baton.worker.cuda.kernels.embed import embed
from baton.worker.cuda.kernels.finite_check import mark_not_finite
from baton.worker.cuda.kernels.gemv import gemv
from baton.worker.cuda.kernels.logprobs import write_logprobs
from baton.worker.cuda.kernels.pool_rows import pool_rows
from baton.worker.cuda.kernels.sample import SampleScratch, sample
from baton.worker.cuda.layer_steps import LayerSteps, StepLimits
from baton.worker.cuda.step_inputs import StepInputs
from baton.worker.cuda.weights import DecoderWeights
from baton.worker.pooling import LARGEST, STEPS_PER_ONE

Hidden = tuple[Tensor, Tensor | None]
"""Rows of a step, and the rows still to be added to them."""


class DecoderStep(LayerSteps):
    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        pool: Tensor,
        limits: StepLimits,
        *,
        deterministic: bool = False,
        collective: TensorCollective | None = None,
    ) -> None:
        """pool: [blocks, layers, 2, kv_heads, block_size, head_dim]. deterministic: the bits of a row do not depend on the
        other rows of a step. collective: the other ranks, if the weights are of one rank's part."""
        super().__init__(config, weights, pool, limits, deterministic=deterministic, collective=collective)
        self.rows_per_tile = rows_per_tile(config.heads, config.kv_heads, self.dtype)
        self.last_hidden: Hidden = torch.empty(0), None
        "All rows of the last step with prompts, and the rows still to be added to them. Set by the replay of a graph."
        rows, sequences, sampled, device = limits.rows, limits.sequences, limits.sampled, self.device

        def column(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._logits = self._buffer(sampled, config.vocab_size, torch.float32)
        self._tokens, self._broken = column(sampled), column(rows)
        self.last_tokens = column(sequences)
        """[slots] last sampled token. For a slot with drafts it is the token of any of its rows: the next step has the token
        from the host."""
        adjustable = 1 if limits.greedy else config.vocab_size
        self.columns = SlotColumns(sequences, adjustable, device, drafts=limits.drafts)
        self.adjustments = Adjustments(self.columns.adjust, rows, sampled)
        self._sample_scratch = SampleScratch(sampled, config.vocab_size, device)
        self._row_scales = torch.zeros(2, rows, dtype=torch.float32, device=device)
        self._pooled = torch.zeros(sequences, config.hidden_size, dtype=torch.int64, device=device)

    def run(self, inputs: StepInputs, *, draws: bool = True, even: bool = False) -> None:
        """Queues the step.

        `logits`, `tokens` and `broken` are valid when the stream has reached it. draws: some rows are not greedy. even: the
        decoded sequences have about equal lengths.
        """
        self.run_layers(inputs, even=even)
        self.choose_tokens(inputs, draws=draws)

    def run_layers(self, inputs: StepInputs, *, even: bool) -> None:
        self._tuning = FIXED_TUNING if self.deterministic else tuning_for(len(inputs.order), self.config.kv_heads, even=even)
        rows = len(inputs.token_ids)
        residual = self._residual[:rows]
        scale = self.config.traits.embedding_scale
        embed(inputs.token_ids, inputs.row_slots, self.last_tokens, self.weights.embedding, residual, scale)
        added = self._run_layers(inputs, residual)
        self.last_hidden = residual, added
        if inputs.tiles is not None:
            mark_not_finite(residual, added, self._broken[:rows])

    def choose_tokens(self, inputs: StepInputs, *, draws: bool) -> None:
        """Chooses tokens of the due sequences. Must follow run_layers."""
        due, eps, (residual, added) = len(inputs.due_slots), self.config.norm_eps, self.last_hidden
        if not due:
            return
        norm = self.weights.final_norm
        if len(residual) == 1 and added is None and self.collective is None and not (self.deterministic or norm.centred):
            gemv(residual, self.weights.head, self._logits[:1], norm=norm.weight, eps=eps, pdl=self.pdl)
        else:
            normed = self._normed[:due]
            add_norm(residual, added, norm, eps, normed, inputs.due_rows)
            self._head(normed, self._logits[:due])
        self._choose(inputs, draws)

    def logits(self, due: int) -> Tensor:
        """float32 [due, vocabulary] of the last step, adjusted."""
        return self._logits[:due]

    def write_prompt_logprobs(self, rows: Tensor, tokens: Tensor, top_logprobs: Tensor) -> None:
        """Log-probabilities of these tokens, each after its row of the last step, which had prompts (PromptRows).
        `prompt_words` is valid when the stream has reached it."""
        kept = self.adjustments
        residual, added = self.last_hidden
        for at in range(0, len(rows), len(kept.raw)):
            part = slice(at, min(at + len(kept.raw), len(rows)))
            count = part.stop - part.start
            normed, logits = self._normed[:count], kept.raw[:count]
            add_norm(residual, added, self.weights.final_norm, self.config.norm_eps, normed, rows[part])
            self._head(normed, logits)
            write_logprobs(
                *(logits, logits, kept.nothing_adjusted, kept.every_row[:count], tokens[part], top_logprobs[part]),
                *(kept.scratch, kept.prompt_words[part]),
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
        """int32 [due] of the last step: argmax.NOT_FINITE_ID or NOTHING_LEFT_ID for a failed row."""
        return self._tokens[:due]

    def broken(self, rows: int) -> Tensor:
        """int32 [rows] of the last step with prompts: 1 for a row with NaN or infinity."""
        return self._broken[:rows]

    def _choose(self, inputs: StepInputs, draws: bool) -> None:
        due = len(inputs.due_slots)
        logits, tokens, scratch, slots = self._logits[:due], self._tokens[:due], self._sample_scratch, inputs.due_slots
        if not draws:
            argmax(logits, slots, scratch.argmax, tokens, self.last_tokens)
            return
        if self.limits.greedy:
            raise ValueError("a step without memory for sampling cannot draw")
        kept = self.adjustments
        columns, adjusted = kept.columns, kept.rows.adjusted
        adjust(logits, kept.raw, slots, inputs.tallies, self.last_tokens, columns, kept.rows)
        argmax(logits, slots, scratch.argmax, tokens, self.last_tokens, adjusted)
        sample(logits, slots, inputs.outputs, self.columns.draws, scratch, tokens, self.last_tokens)
        write_logprobs(logits, kept.raw, adjusted, slots, tokens, columns.top_logprobs, kept.scratch, kept.logprob_words)
        tally(slots, inputs.tallies, tokens, columns)

    def _head(self, x: Tensor, out: Tensor) -> None:
        """Compute logits from hidden rows, always in float32: rounded to bfloat16 the likeliest tokens would often be equal."""
        if self.collective is None:
            self._float_product(x, self.weights.head, out)
            return
        part = out.new_empty(len(x), len(self.weights.head))
        self._float_product(x, self.weights.head, part)
        out.copy_(gather_logits(self.config, self.collective, part))
