"""A large model on an ordinary machine: a Llama-3-8B in Q4_K_M, from the file on disk to an answer.

    python bench/large_model.py [--folder DIR] [--shape llama-3-8b] [--rounds 2] [--llamacpp FOLDER]

The weights are random (what they say does not matter for time), the file is made once and kept in --folder: 4.6 GiB. Then,
each with the file out of the page cache (cold) and in it (warm), interleaved:

read     all bytes of the file, in order, as `cat` does it
start    from the start of `baton serve` until /health says 200; goal: at most 1.3x the read
memory   PSS of all processes of the server, and what of it is anonymous (not the file's own pages)
decode   one stream, 24 tokens behind a short prompt; prompt of 256 tokens

`--llamacpp`: what bench/peers/build_llamacpp.py has built; its llama-bench runs on the same file with as many threads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from baton.models.config import ModelConfig
from baton.models.loaders.gguf_reader import GGUFFile
from baton.models.names import resolve
from baton.models.shapes import SHAPES
from measuring.processes import free_port

Q4_K, Q6_K, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_K", "Q6_K", "F32"))
CHUNK = 64 << 20
READY_SECONDS_MAX = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/baton/bench")
    parser.add_argument("--shape", choices=sorted(name for name in SHAPES if name.startswith("llama")), default="llama-3-8b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--llamacpp", type=Path)
    options = parser.parse_args()
    path = options.folder / f"{options.shape}.Q4_K_M.gguf"
    if not path.exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        make(path, SHAPES[options.shape])
    for number in range(options.rounds):
        for cold in (True, False):
            if cold:
                forget(path)
            read = read_seconds(path)
            if cold:
                forget(path)
            told = {"round": number, "file": "cold" if cold else "warm", "read_s": round(read, 2)}
            told |= served(path, options.threads)
            told["start / read"] = round(told["start_s"] / read, 2)
            print(json.dumps(told), flush=True)
    if options.llamacpp:
        bench = options.llamacpp / "bin/llama-bench"
        subprocess.run([bench, "-m", path, "-t", str(options.threads), "-p", "256", "-n", "24", "-r", "2"], check=True)


# The file


def make(path: Path, config: ModelConfig) -> None:
    """As llama.cpp's Q4_K_M has it: half of the layers' values and downs in Q6_K, and the head; the rest in Q4_K.
    The tokenizer is the default model's, filled up with words that nobody says."""
    print(f"making {path} ...", file=sys.stderr)
    writer = gguf.GGUFWriter(path.with_suffix(".part"), "llama")
    describe(writer, config, "llama", {"rope.dimension_count": config.head_dim, "vocab_size": config.vocab_size})
    write_tensors(writer, list(tensors_of(config)))
    path.with_suffix(".part").rename(path)


def write_tensors(writer: gguf.GGUFWriter, tensors: list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]) -> None:
    """One at a time: no more than the largest of them is in memory."""
    for name, shape, kind in tensors:
        raw_shape = gguf.quant_shape_to_byte_shape(shape, kind) if kind != F32 else shape
        writer.add_tensor_info(name, raw_shape, np.dtype(np.float32 if kind == F32 else np.uint8), nbytes(shape, kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for _, shape, kind in tensors:
        writer.write_tensor_data(numbers(rng, shape, kind))
    writer.close()


def describe(writer: gguf.GGUFWriter, config: ModelConfig, architecture: str, more: dict[str, int]) -> None:
    for key, number in {
        "block_count": config.layers,
        "context_length": config.context_tokens_max,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        **more,
    }.items():
        writer.add_uint32(f"{architecture}.{key}", number)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope.theta)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.norm_eps)
    add_tokenizer(writer, config)


def add_tokenizer(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    known = GGUFFile(resolve("smollm2")).metadata
    words, types = list(known["tokenizer.ggml.tokens"]), list(known["tokenizer.ggml.token_type"])
    more = config.vocab_size - len(words)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(known.get("tokenizer.ggml.pre", "smollm")))
    writer.add_token_list([*words, *(f"<|unused {number}|>" for number in range(more))])
    writer.add_token_types([*types, *[int(gguf.TokenType.UNUSED)] * more])
    writer.add_token_merges(list(known["tokenizer.ggml.merges"]))
    for name in ("bos", "eos"):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", int(known[f"tokenizer.ggml.{name}_token_id"]))
    writer.add_chat_template(str(known["tokenizer.chat_template"]))


def tensors_of(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "token_embd.weight", (config.vocab_size, hidden), Q6_K if config.tied_embeddings else Q4_K
    for layer in range(config.layers):
        better = Q6_K if layer < config.layers // 8 or layer >= 7 * config.layers // 8 or layer % 3 == 2 else Q4_K
        yield f"blk.{layer}.attn_norm.weight", (hidden,), F32
        yield f"blk.{layer}.attn_q.weight", (q, hidden), Q4_K
        yield f"blk.{layer}.attn_k.weight", (kv, hidden), Q4_K
        yield f"blk.{layer}.attn_v.weight", (kv, hidden), better
        yield f"blk.{layer}.attn_output.weight", (hidden, q), Q4_K
        yield f"blk.{layer}.ffn_norm.weight", (hidden,), F32
        yield f"blk.{layer}.ffn_gate.weight", (inner, hidden), Q4_K
        yield f"blk.{layer}.ffn_up.weight", (inner, hidden), Q4_K
        yield f"blk.{layer}.ffn_down.weight", (hidden, inner), better
    yield "output_norm.weight", (hidden,), F32
    if not config.tied_embeddings:
        yield "output.weight", (config.vocab_size, hidden), Q6_K


def nbytes(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape)) // elements * size


def numbers(rng: np.random.Generator, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Around zero, of a size that a trained model's might have."""
    if kind == F32 and len(shape) == 1:
        return np.ones(shape, np.float32)
    if kind == F32:
        return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    data = np.frombuffer(rng.bytes(nbytes(shape, kind)), np.uint8).copy().reshape(-1, size)
    if kind == Q4_K:  # scale * (0..63) * (0..15) - minimum * (0..63)
        data[:, :4] = np.array([1e-4, 7.5e-4], np.float16).view(np.uint8)
    else:  # scale * (-128..127) * (-32..31)
        data[:, 208:] = np.array([1e-5], np.float16).view(np.uint8)
    return data.reshape(*shape[:-1], -1)


# The measurements


def forget(path: Path) -> None:
    """The file leaves the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read_seconds(path: Path) -> float:
    begin, buffer = time.perf_counter(), bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - begin


def served(path: Path, threads: int) -> dict[str, Any]:
    port = free_port()
    command = [sys.executable, "-m", "baton.cli.main", "serve", "--model", str(path), "--port", str(port)]
    command += ["--threads", str(threads), "--max-model-len", "2048", "--kv-blocks", "256", "--log-level", "warning"]
    begin = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_ready(server, port, begin + READY_SECONDS_MAX)
        told: dict[str, Any] = {"start_s": round(time.perf_counter() - begin, 2), **memory(server.pid)}
        return told | speed(port)
    finally:
        server.terminate()
        server.wait(60)


def wait_ready(server: subprocess.Popen[bytes], port: int, deadline: float) -> None:
    while time.perf_counter() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit("the server is not ready")


def speed(port: int) -> dict[str, float]:
    """Decoding from the difference of two lengths; the prompt by its first token."""
    one = seconds(port, list(range(1000, 1016)), 1)
    many = seconds(port, list(range(2000, 2016)), 25)
    prompt = seconds(port, [3000 + 7 * n for n in range(256)], 1)
    return {"decode tok/s": round(24 / (many - one), 2), "prompt tok/s": round(256 / prompt, 1)}


def seconds(port: int, prompt: list[int], tokens: int) -> float:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == tokens
    return time.perf_counter() - begin


def memory(pid: int) -> dict[str, float]:
    """GiB, of a process and all below it."""
    total = {"Pss": 0, "Pss_Anon": 0}
    for each in [pid, *below(pid)]:
        for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in total:
                total[name] += int(rest.split()[0])
    return {"memory_gib": round(total["Pss"] / 2**20, 2), "anonymous_gib": round(total["Pss_Anon"] / 2**20, 2)}


def below(pid: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [found for child in children for found in (child, *below(child))]


if __name__ == "__main__":
    main()
