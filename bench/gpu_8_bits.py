"""Weights and KV cache in fp8 against bfloat16: the section `8_bits` of bench/gpu.py.

error    of logits relative to their norm, mean; same: how often the likeliest token is the same. Of 16 prompts of 256 tokens, 8
         in a step, and of four tokens decoded after each, in batches of 8 and (`many`) of 64: from 33 rows on activations
         are rounded as well
blocks   weights with scales of blocks of 128 x 128, as checkpoints in fp8 have them
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from baton.models.config import ModelConfig
from baton.worker.cuda.decoder_step import DecoderStep
from baton.worker.cuda.graphs import DeviceSteps
from baton.worker.cuda.kernels.fp8 import FP8, LARGEST, STORED_BLOCK, Scales, scales_of_blocks
from baton.worker.cuda.layer_steps import StepLimits
from baton.worker.cuda.step_inputs import StepBatch
from baton.worker.cuda.weights import DecoderWeights, LinearWeights, random_weights

KINDS = {
    "bfloat16": ("none", False),
    "kv": ("none", True),
    "weights": ("outputs", False),
    "both": ("outputs", True),
    "blocks": ("blocks", False),
}
SEQUENCES, CONTEXT, BLOCK_SIZE = 256, 1024, 16
PROMPT, STEPS = 256, 4
Row = dict[str, object]


def eight_bits(config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    import gpu

    weights, wanted = None, None
    limits = StepLimits(rows=4096, sequences=SEQUENCES, context_tokens=CONTEXT + 128)
    for name, (of_weights, of_kv) in KINDS.items():
        if not of_kv:
            weights = None
            torch.cuda.empty_cache()
            weights = random_weights(config, torch.bfloat16, "cuda", fp8=of_weights == "outputs")
            if of_weights == "blocks":
                weights = in_blocks(weights)
        rig = gpu.Rig.__new__(gpu.Rig)
        rig.config, rig.context = config, CONTEXT
        rig.step = DecoderStep(config, weights, pool(config, of_kv), limits)
        numbers = np.random.default_rng(1).permutation(len(rig.step.pool)).astype(np.int32)
        rig.step.tables.copy_(torch.from_numpy(numbers.reshape(SEQUENCES, -1)))
        rig.steps = DeviceSteps(rig.step)
        found = {"few": logits(rig.steps, config, 8), "many": logits(rig.steps, config, 64)}
        wanted = wanted or found
        row: Row = {"8_bits": name}
        for rows, ours in found.items():
            error = ((ours - wanted[rows]).norm(dim=1) / wanted[rows].norm(dim=1)).mean().item()
            same = (ours.argmax(1) == wanted[rows].argmax(1)).float().mean().item()
            row |= {f"error_{rows}": error, f"same_{rows}": same}
        for batch in (1, 2, 4, 8, 32, 64, 128, 256):
            row[f"ms_{batch}"] = rig.decode_times(batch, 20)[0]
        row["ms_2x1024"] = prompt_time(rig.steps, config)
        yield row
        del rig
        torch.cuda.empty_cache()


def in_blocks(weights: DecoderWeights) -> DecoderWeights:
    def packed(linear: LinearWeights) -> LinearWeights:
        weight, scales = matrix_in_blocks(linear.weight.view(-1, linear.weight.shape[-1]))
        return LinearWeights(weight.view(linear.weight.shape), linear.bias, scales)

    layers = (
        replace(
            layer,
            qkv=packed(layer.qkv),
            output=packed(layer.output),
            gate_up=packed(layer.gate_up),
            down=packed(layer.down),
        )
        for layer in weights.layers
    )
    return replace(weights, layers=tuple(layers))


def matrix_in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, Scales]:
    rows, width = (-(-extent // STORED_BLOCK) for extent in weight.shape)
    padded = torch.zeros(rows * STORED_BLOCK, width * STORED_BLOCK, device=weight.device)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, STORED_BLOCK, width, STORED_BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / LARGEST
    blocks /= scales[:, None, :, None]
    packed = padded[: weight.shape[0], : weight.shape[1]].clamp(-LARGEST, LARGEST).to(FP8)
    return packed, scales_of_blocks([scales], [len(weight)], weight.shape[1])


def pool(config: ModelConfig, of_kv: bool) -> torch.Tensor:
    blocks = SEQUENCES * -(-(CONTEXT + 128) // BLOCK_SIZE)
    dtype = torch.float8_e4m3fn if of_kv else torch.bfloat16
    made = torch.empty(blocks, config.layers, 2, config.kv_heads, BLOCK_SIZE, config.head_dim, dtype=dtype, device="cuda")
    for part in made.split(1024):
        part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device="cuda"))
    return made


def batch_of(ids: Any, contexts: int, first: int = 0) -> StepBatch:
    """ids: [sequences, tokens], all with so many before them."""
    count, length = ids.shape
    return StepBatch(
        token_ids=ids.reshape(-1).astype(np.int32),
        slots=np.arange(first, first + count),
        starts=np.arange(count + 1) * length,
        contexts=np.full(count, contexts),
        due=np.ones(count, np.bool_),
        outputs=np.zeros(count, np.int64),
        draws=False,
    )


def logits(steps: DeviceSteps, config: ModelConfig, batch: int) -> torch.Tensor:
    """Of prompts, and of tokens decoded after them: the same ones for everybody, whatever was likeliest."""
    ids, found = np.random.default_rng(batch).integers(0, config.vocab_size, (batch, PROMPT + STEPS)), []
    for first in range(0, batch, 8):
        steps.launch(batch_of(ids[first : first + 8, :PROMPT], 0, first)).done.synchronize()
        found.append(steps.step.logits(8).clone())
    for step in range(STEPS):
        at = PROMPT + step
        steps.launch(batch_of(ids[:, at : at + 1], at)).done.synchronize()
        found.append(steps.step.logits(batch).clone())
    return torch.cat(found)


def prompt_time(steps: DeviceSteps, config: ModelConfig) -> float:
    batch = batch_of(np.random.default_rng(9).integers(0, config.vocab_size, (2, 1024)), 0)
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(steps.stream)
        steps.launch(batch)
        end.record(steps.stream)
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[1]
