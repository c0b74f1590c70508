"""transformers' continuous batching on the same GPU with the same shape: the section `peer` of bench/gpu.py.

    python bench/gpu_peer.py SHAPE CASE...        a process of its own; prints one JSON object per case

A case is NAME:BATCH:PROMPT:OUTPUT. stock: as installed (SDPA). best: paged attention by torch's flash attention operator, CUDA
graphs, asynchronous batching: the fastest way found without other packages.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from baton.models.config import ModelConfig

CASES = ("best:1:1024:64", "best:8:1024:48", "best:64:1024:72", "stock:1:1024:24", "stock:8:1024:24", "best:256:1024:170")
"""Outputs are long enough that all decode together for a while: two prompts are computed in a step."""
SECONDS_MAX = 220.0
BLOCK_SIZE = 256


def peer(config: ModelConfig, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    command = [sys.executable, __file__, options.shape, *CASES]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        try:
            code = subprocess.run(command, stdout=said, stderr=errors, timeout=SECONDS_MAX).returncode
        except subprocess.TimeoutExpired:
            code = -1
        for file in (said, errors):
            file.seek(0)
        yield from (json.loads(line) for line in said if line.startswith("{"))
        if code:
            yield {"failed": f"{code}, after at most {SECONDS_MAX:g} s: {errors.read()[-300:]}"}


def flash_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float | None = None,
    **kept: Any,
) -> tuple[torch.Tensor, None]:
    keys, values = kept["cache"].update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=kept["read_index"],
        write_index=kept["write_index"],
    )
    ends, longest = kept["cu_seq_lens_k"], kept["max_seqlen_k"]
    if isinstance(ends, dict):
        ends, longest = ends["full_attention"], longest["full_attention"]
    found = torch.ops.aten._flash_attention_forward(
        *(query.transpose(1, 2).squeeze(0).contiguous(), keys.contiguous(), values.contiguous()),
        *(kept["cu_seq_lens_q"].int(), ends.int(), kept["max_seqlen_q"], longest, 0.0, True, False),
        scale=scaling,
    )[0]
    return found.unsqueeze(0), None


def build(config: ModelConfig) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim, max_position_embeddings=8192, rms_norm_eps=config.norm_eps, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return LlamaForCausalLM(shape).eval()


def measure(model: Any, name: str, batch: int, length: int, output: int) -> dict[str, object]:
    from transformers.generation import ContinuousBatchingConfig, GenerationConfig

    best = name == "best"
    model.set_attn_implementation("paged|torch_varlen" if best else "paged|sdpa")
    prompts = torch.randint(3, model.config.vocab_size, (batch, length), device="cpu").tolist()
    asked = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        block_size=BLOCK_SIZE, num_blocks=batch * (math.ceil((length + output) / BLOCK_SIZE) + 1) + 8, max_batch_tokens=2048,
        max_requests_per_batch=batch, allow_block_sharing=False, safety_margin=0.0, use_cuda_graph=best,
        use_async_batching=best, default_compile_level=0,
    )  # fmt: skip
    for _ in range(2):  # the first one captures and compiles
        answers = list(
            model.generate_batch(
                *(prompts,),
                generation_config=asked,
                continuous_batching_config=batching,
                progress_bar=False,
                record_timestamps=True,
                persistent_manager=True,
            ).values()
        )
    model.destroy_cached_continuous_batching_manager()
    first, end = max(answer.timestamps[0] for answer in answers), min(answer.timestamps[-1] for answer in answers)
    gaps = [late - early for answer in answers for early, late in pairwise(answer.timestamps) if early >= first and late <= end]
    wall = max(answer.timestamps[-1] for answer in answers) - min(answer.created_time for answer in answers)
    return {
        "peer": f"transformers, {name}", "batch": batch, "in": length, "out": output,
        "step_ms": 1e3 * statistics.median(gaps), "tok_s": batch * output / wall,
    }  # fmt: skip


def main() -> None:
    from transformers import AttentionInterface

    from baton.models.shapes import SHAPES

    AttentionInterface.register("paged|torch_varlen", flash_attention)
    model = build(SHAPES[sys.argv[1]])
    for case in sys.argv[2:]:
        name, *numbers = case.split(":")
        try:
            row = measure(model, name, *map(int, numbers))
        except Exception as error:
            row = {"peer": name, "failed": repr(error)[:200]}
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
