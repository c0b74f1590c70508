"""What it costs to know the weights by their content: the first start, and every one after it.

    python bench/identity.py [--gib 1] [--threads N]

Makes a Llama of random bfloat16 weights of that size in a temporary folder, and loads it as the worker does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from baton.config import WorkerConfig
from baton.models.open import open_model
from baton.worker.platforms.cpu import CpuPlatform, usable_cores
from baton.worker.weights_digest import RECENT_SECONDS, Digest, DigestInProgress

HIDDEN, INNER, HEADS, VOCABULARY = 2048, 5632, 16, 32_000


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        of_layer = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        of_layer |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
        norms = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in {**of_layer, **norms}.items()}
    return found


def write_model(folder: Path, gib: float) -> int:
    """Bytes of the weights. Written by hand: the safetensors package knows no bfloat16 without torch."""
    per_layer = sum(int(np.prod(shape)) for name, shape in shapes(1).items() if ".layers." in name)
    layers = max(1, round((gib * 2**30 / 2 - VOCABULARY * HIDDEN) / per_layer))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN}
    config |= {"intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS, "rms_norm_eps": 1e-5}
    config |= {"num_key_value_heads": HEADS, "tie_word_embeddings": True, "max_position_embeddings": 2048, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config))
    table, at = {}, 0
    for name, shape in shapes(layers).items():
        end = at + 2 * int(np.prod(shape))
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    head = json.dumps(table).encode()
    random = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for shape in shapes(layers).values():
            values = random.standard_normal(shape, np.float32) * np.float32(HIDDEN**-0.5)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return (folder / "model.safetensors").stat().st_size


def digest(folder: Path, cache: Path, threads: int) -> Digest:
    begun = time.perf_counter()
    with DigestInProgress(open_model(folder).files, threads, cache) as digesting:
        found = digesting.result()
    return Digest(found.value, time.perf_counter() - begun, found.read_bytes)


def load(folder: Path, threads: int) -> float:
    opened = open_model(folder)
    begun = time.perf_counter()
    CpuPlatform().load(opened, WorkerConfig(model=str(folder), threads=threads))
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of the digest and of loading")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-identity-") as name:
        folder, cache = Path(name, "model"), Path(name, "cache")
        folder.mkdir()
        size = write_model(folder, options.gib)
        time.sleep(RECENT_SECONDS + 0.5)  # a digest of a younger file is not kept
        first, second = digest(folder, cache, options.threads), digest(folder, cache, options.threads)
        loading = load(folder, options.threads)
    assert first.value == second.value
    assert not second.read_bytes
    print(f"{size / 2**30:.2f} GiB of weights, {options.threads} threads")
    print(f"loading                    {loading:8.3f} s")
    print(f"digest, first start        {first.seconds:8.3f} s  {100 * first.seconds / loading:6.2f} % of loading, beside it")
    print(
        f"digest, every later start  {second.seconds:8.5f} s  {100 * second.seconds / loading:6.3f} % of loading (goal: < 5 %)"
    )


if __name__ == "__main__":
    main()
