"""A large mixture of experts on an ordinary machine: Qwen3-30B-A3B's shape in Q4_K_M, from the file on disk to an answer.

    python bench/large_moe.py [--folder DIR] [--layers 48] [--rounds 2] [--peer PYTHON]

The weights are random, the file is made once, tensor by tensor, and kept in --folder: 18 GB with all 48 layers. A machine with
less memory measures fewer layers: time and memory grow with them, but for embedding and head.

start    from the start of `baton serve` until /health says 200
memory   PSS of all processes of the server, and what of it is anonymous (not the file's own pages)
decode   one stream, 24 tokens behind a short prompt; prompt of 256 tokens

`--goals`: exit status 1 if a round takes more than 24 GB of memory (PSS).
`--peer`: a Python with the package xllamacpp, a build of llama.cpp; its server gets the same prompts from the same file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf

from baton.models.config import ModelConfig
from baton.models.shapes import SHAPES
from large_model import F32, Q4_K, Q6_K, describe, served, write_tensors

PEER = """
import json, sys, xllamacpp as x
params = x.CommonParams()
params.model.path, params.n_ctx, params.warmup = sys.argv[1], 2048, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
params.n_parallel, params.load_mode = 1, 0  # not mapped: our server leaves the page cache, and single pages would be read
server = x.Server(params)
def ask(prompt, tokens):
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    return server.handle_completions(body)["timings"]
ask(list(range(1000, 1016)), 4)
decode, prompt = ask(list(range(2000, 2016)), 25), ask([3000 + 7 * n for n in range(256)], 1)
print(json.dumps({"llama.cpp decode tok/s": round(decode["predicted_per_second"], 2),
                  "llama.cpp prompt tok/s": round(prompt["prompt_per_second"], 1)}))
"""

MEMORY_GB_MAX = 24.0


def missed(memory_gib: float) -> list[str]:
    """Goals that this memory misses. The measurement is in GiB, the goal in GB."""
    gigabytes = memory_gib * 2**30 / 1e9
    return [f"{gigabytes:.1f} GB of memory; the goal is {MEMORY_GB_MAX:.0f} GB at most"] if gigabytes > MEMORY_GB_MAX else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/baton/bench")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--goals", action="store_true", help="exit status 1 if the memory misses its goal")
    options = parser.parse_args()
    config = replace(SHAPES["qwen3-30b-a3b"], layers=options.layers)
    path = options.folder / f"qwen3-30b-a3b.{options.layers}-layers.Q4_K_M.gguf"
    if not path.exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        make(path, config)
    misses: list[str] = []
    for number in range(options.rounds):
        found = served(path, options.threads)
        print(json.dumps({"round": number, "layers": options.layers} | found), flush=True)
        misses += missed(found["memory_gib"]) if options.goals else []
        if options.peer:
            subprocess.run([options.peer, "-c", PEER, path, str(options.threads)], check=True, stderr=subprocess.DEVNULL)
    for miss in misses:
        print(f"MISSED: {miss}", flush=True)
    return int(bool(misses))


def make(path: Path, config: ModelConfig) -> None:
    """As llama.cpp's Q4_K_M has it: half of the layers' values and downs in Q6_K, and the head; the rest in Q4_K."""
    print(f"making {path} ...", file=sys.stderr)
    writer = gguf.GGUFWriter(path.with_suffix(".part"), "qwen3moe")
    experts = config.experts
    assert experts is not None
    sizes = {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    sizes |= {"expert_count": experts.count, "expert_used_count": experts.per_token}
    describe(writer, config, "qwen3moe", {**sizes, "expert_feed_forward_length": experts.inner_size})
    write_tensors(writer, list(tensors_of(config)))
    path.with_suffix(".part").rename(path)


def tensors_of(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
    hidden, experts = config.hidden_size, config.experts
    assert experts is not None
    q, kv, count, inner = config.q_size, config.kv_size, experts.count, experts.inner_size
    yield "token_embd.weight", (config.vocab_size, hidden), Q4_K
    for layer in range(config.layers):
        better = Q6_K if layer < config.layers // 8 or layer >= 7 * config.layers // 8 or layer % 3 == 2 else Q4_K
        yield f"blk.{layer}.attn_norm.weight", (hidden,), F32
        yield f"blk.{layer}.attn_q.weight", (q, hidden), Q4_K
        yield f"blk.{layer}.attn_k.weight", (kv, hidden), Q4_K
        yield f"blk.{layer}.attn_v.weight", (kv, hidden), better
        yield f"blk.{layer}.attn_q_norm.weight", (config.head_dim,), F32
        yield f"blk.{layer}.attn_k_norm.weight", (config.head_dim,), F32
        yield f"blk.{layer}.attn_output.weight", (hidden, q), Q4_K
        yield f"blk.{layer}.ffn_norm.weight", (hidden,), F32
        yield f"blk.{layer}.ffn_gate_inp.weight", (count, hidden), F32
        yield f"blk.{layer}.ffn_gate_exps.weight", (count, inner, hidden), Q4_K
        yield f"blk.{layer}.ffn_up_exps.weight", (count, inner, hidden), Q4_K
        yield f"blk.{layer}.ffn_down_exps.weight", (count, hidden, inner), better
    yield "output_norm.weight", (hidden,), F32
    yield "output.weight", (config.vocab_size, hidden), Q6_K


if __name__ == "__main__":
    raise SystemExit(main())
