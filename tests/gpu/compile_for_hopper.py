"""Compiles every kernel of a step for an H200, to machine code, on a machine without a GPU.

Prints a line for each: its name, the bytes of its code, of its shared memory, and of each thread's memory beside the registers.

The interpreter accepts what the compiler does not (a variable that changes its shape in a loop, a wrong constant). Triton is
told here that its target is a Hopper GPU, and every launch stops before it launches. Products of cuBLAS are left out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.models.config import Experts, ModelConfig, RopeConfig, Traits
from baton.worker.cuda.decoder_step import DecoderStep
from baton.worker.cuda.kernels.fp8 import GROUP, STORED_BLOCK, Scales
from baton.worker.cuda.kernels.fp8_rows import quantise_rows
from baton.worker.cuda.kernels.grouped_gemm_mxfp4 import split_mxfp4
from baton.worker.cuda.layer_steps import StepLimits
from baton.worker.cuda.step_inputs import StepBatch, decode_views, ints_needed, mixed_views, pack_decode, pack_mixed
from baton.worker.cuda.weights import DecoderWeights, LinearWeights, random_weights

ROWS, SLOTS = 160, 96
CASES = (
    "plain",
    "deterministic",
    "experts",
    "fp8",
    "blocks",
    "experts fp8",
    "experts blocks",
    "traits",
    "experts traits",
    "gpt-oss",
    "float32",
)
TRAITS = Traits(
    qk_norm=True, qk_norm_across_heads=True, layer_norm=True, norm_bias=True, norms="both", activation="gelu_tanh",
    embedding_scale=2.0, layer_windows=(100,), qkv_bias=True, mlp_bias=True,
)  # fmt: skip


class Hopper:
    """What Triton asks of a driver before it launches anything."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_only(launch: Any) -> Any:
    seen = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            print(self.__name__, len(kernel.asm["cubin"]), kernel.metadata.shared, stack_bytes(kernel.asm["cubin"]), flush=True)
        return kernel

    return run


def stack_bytes(cubin: bytes) -> int:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    return max(map(int, re.findall(r"STACK:(\d+)", said.stdout + said.stderr)))


def with_blocks(weights: DecoderWeights) -> DecoderWeights:
    """Scales of blocks beside those of outputs."""

    def scaled(linear: LinearWeights) -> LinearWeights:
        assert linear.scales is not None
        outputs, inputs = linear.weight.view(-1, linear.weight.shape[-1]).shape
        blocks = torch.ones(outputs // GROUP, inputs // STORED_BLOCK)
        return replace(linear, scales=Scales(linear.scales.outputs, blocks))

    def layer(one: Any) -> Any:
        return replace(one, **{name: scaled(getattr(one, name)) for name in ("qkv", "output", "gate_up", "down")})

    return replace(weights, layers=tuple(map(layer, weights.layers)))


def in_4_bits(weights: DecoderWeights) -> DecoderWeights:
    """Experts in MXFP4."""

    def packed(linear: LinearWeights) -> LinearWeights:
        experts, outputs, inputs = linear.weight.shape
        bytes_of_rows = torch.zeros(experts * outputs, inputs // 32 * 17, dtype=torch.uint8)
        weight, exponents = split_mxfp4(bytes_of_rows)
        return replace(linear, weight=weight.view(experts, outputs, -1), exponents=exponents)

    layers = (replace(one, gate_up=packed(one.gate_up), down=packed(one.down)) for one in weights.layers)
    return replace(weights, layers=tuple(layers))


def main() -> None:
    driver.set_active(Hopper())
    JITFunction.run = compile_only(JITFunction.run)
    torch.mm = lambda *args, **options: None  # type: ignore[assignment]
    config = ModelConfig(
        architecture="qwen3", vocab_size=8192, layers=1, hidden_size=1024, heads=16, kv_heads=4, head_dim=128,
        intermediate_size=1536, rope=RopeConfig(), norm_eps=1e-6, tied_embeddings=True, context_tokens_max=512,
        traits=Traits(qk_norm=True),
    )  # fmt: skip
    experts = Experts(count=16, per_token=4, inner_size=256, normalised=True)
    pool = torch.zeros(8, 1, 2, config.kv_heads, 16, config.head_dim, dtype=torch.bfloat16)
    nobody = np.zeros(0, np.int32)
    empty = StepBatch(nobody, nobody, np.zeros(1, np.int32), nobody, np.zeros(0, np.bool_), nobody)
    two = np.zeros(2, np.int64)
    chunk = StepBatch(np.zeros(140, np.int32), two, np.array([0, 139, 140]), two, np.ones(2, np.bool_), two)
    for name in sys.argv[1:] or CASES:
        deterministic, fp8, blocks = name == "deterministic", name.endswith(("fp8", "blocks")), name.endswith("blocks")
        shape = replace(config, experts=experts) if name.startswith("experts") else config
        if name == "traits":
            shape = replace(config, traits=TRAITS)
        if name == "experts traits":
            rule = {"scoring": "sigmoid", "correction": True, "scale": 1.5, "shared_size": 128, "shared_gate": True}
            shape = replace(config, traits=Traits(activation="swiglu_oai"), experts=replace(experts, **rule))
        if name == "gpt-oss":  # its own widths, of which 128 is no divisor
            traits = Traits(sinks=True, activation="swiglu_oai", layer_windows=(128,), qkv_bias=True, output_bias=True)
            mixture = replace(experts, inner_size=2880, bias=True)
            shape = replace(config, hidden_size=2880, traits=traits, experts=mixture)
        dtype = torch.float32 if name == "float32" else torch.bfloat16
        weights = random_weights(shape, dtype, "cpu", fp8=fp8)
        weights = with_blocks(weights) if blocks else weights
        weights = in_4_bits(weights) if name == "gpt-oss" else weights
        kept = pool.to(torch.float8_e4m3fn if fp8 else dtype)
        limits = StepLimits(rows=ROWS, sequences=SLOTS, context_tokens=512)
        step = DecoderStep(shape, weights, kept, limits, deterministic=deterministic)
        step.pdl = not deterministic  # as on a GPU
        run = np.zeros(ints_needed(ROWS, SLOTS, step.rows_per_tile), np.int32)
        inputs = torch.from_numpy(run)
        for bucket in (8, 64) if deterministic else (1, 8, 32, SLOTS):
            packing = pack_decode(empty, bucket, run, config.kv_heads, fixed=deterministic)
            step.run(decode_views(packing, inputs), even=True)
        packing = pack_mixed(chunk, run, config.kv_heads, step.rows_per_tile, fixed=deterministic)
        step.run(mixed_views(packing, inputs))
        step.pool_rows(inputs[:2].view(1, 2))
        if fp8:
            x = torch.zeros(40, config.hidden_size, dtype=torch.bfloat16)
            quantise_rows(x, x.to(torch.float8_e4m3fn), torch.zeros(8, 40), STORED_BLOCK if blocks else None)


if __name__ == "__main__":
    sys.exit(main())
