"""Speed of the steps on a GPU, against what its memory and its matrix units allow.

    python bench/gpu.py [--shape llama-3-8b] [--only decode,prefill,server,offline] [--json FILE]

Random weights of the named shape, bfloat16; a pool that is filled with random numbers; random block tables. All sections take
less than ten minutes, but for `kernels`, `prompts` and `8_bits`, which must be asked for (--only). Sections with whole engines:
gpu_serving.py; with prompts that share steps: gpu_prompts.py; with transformers: gpu_peer.py; with fp8: gpu_8_bits.py. One line
per case:

floor    bytes / read bandwidth + operations / matrix rate, whichever is larger for the products, plus the KV stream. The rates
         are fixed (4.3 TB/s, 790 TFLOP/s, an H200), so that percentages can be compared between runs
device   median of the time between events around a step
step     wall-clock time per step, launched two ahead as the server does, tokens fed back on the device and read on the host
host     time that the host needs to launch one step
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import gpu_8_bits
import gpu_peer
import gpu_prompts
import gpu_serving
from baton.models.config import ModelConfig
from baton.models.parameters import expected_shapes
from baton.models.shapes import SHAPES
from baton.worker.cuda.decoder_step import DecoderStep
from baton.worker.cuda.graphs import DeviceSteps
from baton.worker.cuda.kernels.attention_decode import DecodeScratch, attend_decode, split_tokens_for
from baton.worker.cuda.layer_steps import StepLimits
from baton.worker.cuda.step_inputs import StepBatch
from baton.worker.cuda.weights import DecoderWeights, random_weights

BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 4.3e12, 790e12
BATCHES, CONTEXTS = (1, 8, 32, 64, 128, 256), (1024, 2048)
BLOCK_SIZE = 16
Row = dict[str, object]


def main() -> None:
    options = read_options()
    config = SHAPES[options.shape]
    device = torch.cuda.get_device_properties(0)
    print(f"{device.name}, {options.shape}, torch {torch.__version__}", flush=True)
    rows: list[Row] = []
    began = time.perf_counter()
    for section in options.only.split(","):
        for row in rows_of(section, config, options):
            row = {"section": section, **row, "at_s": round(time.perf_counter() - began)}
            rows.append(row)
            print(
                "  ".join(
                    f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
                ),
                flush=True,
            )
    print(f"{time.perf_counter() - began:.0f} s in all")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def rows_of(section: str, config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    """A section that fails leaves the others their turn. What has models of its own needs the memory."""
    if section in ALONE:
        Rig.made, Rig.pool = {}, None
        gc.collect()
        torch.cuda.empty_cache()
    try:
        yield from SECTIONS[section](config, options)
    except Exception as error:
        yield {"failed": f"{type(error).__name__}: {error}"}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--only", default=",".join(name for name in SECTIONS if name not in ("kernels", "prompts", "8_bits")))
    parser.add_argument("--requests", type=int, default=256, help="Of the section offline.")
    parser.add_argument("--quantization", default="auto", help="Of the sections with whole engines.")
    parser.add_argument("--kv-dtype", default="auto", help="Likewise.")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


# Floors


def product_numbers(config: ModelConfig, rows: int = 1) -> float:
    """Weights that so many rows meet, without the embedding table. Of experts: as many as rows pick by chance."""
    shapes = expected_shapes(config)
    matrices = {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2 and name != "embed.weight"}
    of_experts = sum(size for name, size in matrices.items() if ".experts." in name)
    met = 0.0 if config.experts is None else 1.0 - (1.0 - config.experts.per_token / config.experts.count) ** rows
    head = config.vocab_size * config.hidden_size if config.tied_embeddings else 0
    return sum(matrices.values()) - of_experts * (1.0 - met) + head


def kv_bytes_per_token(config: ModelConfig) -> int:
    return 2 * 2 * config.layers * config.kv_size


def decode_floor_ms(config: ModelConfig, batch: int, context: int) -> float:
    operations = 2 * product_numbers(config) * batch
    products = max(2 * product_numbers(config, batch) / BYTES_PER_SECOND, operations / OPERATIONS_PER_SECOND)
    return 1e3 * (products + batch * context * kv_bytes_per_token(config) / BYTES_PER_SECOND)


def prefill_floor_ms(config: ModelConfig, tokens: int) -> float:
    head = config.vocab_size * config.hidden_size
    operations = 2 * (product_numbers(config) - head) * tokens + 2 * config.layers * config.q_size * tokens * tokens
    read = 2 * product_numbers(config, tokens) / BYTES_PER_SECOND  # of many experts that is more
    return 1e3 * max(operations / OPERATIONS_PER_SECOND, read)


# The model on the device


class Rig:
    """A model with random weights and a pool for `sequences` of `context` tokens; made once, the largest that is needed."""

    made: dict[str, DecoderWeights] = {}  # noqa: RUF012
    pool: torch.Tensor | None = None

    def __init__(self, config: ModelConfig, sequences: int, context: int, rows: int, *, deterministic: bool = False) -> None:
        self.config, self.context = config, context
        if config.architecture not in self.made:
            Rig.made = {config.architecture: random_weights(config, torch.bfloat16, "cuda")}
        width = -(-(context + 128) // BLOCK_SIZE)
        shape = (sequences * width, config.layers, 2, config.kv_heads, BLOCK_SIZE, config.head_dim)
        if Rig.pool is None or Rig.pool.shape[0] < shape[0]:
            Rig.pool = None
            torch.cuda.empty_cache()
            Rig.pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            for part in Rig.pool.split(1024):
                part.normal_()
        limits = StepLimits(rows=rows, sequences=sequences, context_tokens=context + 128)
        self.step = DecoderStep(config, self.made[config.architecture], Rig.pool, limits, deterministic=deterministic)
        tables = torch.randperm(Rig.pool.shape[0], device="cuda", dtype=torch.int32)[: sequences * width]
        self.step.tables.copy_(tables.view(sequences, width))
        self.steps = DeviceSteps(self.step)
        torch.cuda.synchronize()

    def decode_batch(self, batch: int, step: int) -> StepBatch:
        everyone = np.arange(batch)
        return StepBatch(
            token_ids=np.full(batch, -1, np.int32),
            slots=everyone,
            starts=np.arange(batch + 1),
            contexts=np.full(batch, self.context + step - 1),
            due=np.ones(batch, np.bool_),
            outputs=np.full(batch, step),
            draws=False,
        )

    def decode_times(self, batch: int, steps: int) -> tuple[float, float, float]:
        """Milliseconds of a step: on the device, in all, and of the host's part."""
        for step in range(3):
            self.steps.launch(self.decode_batch(batch, step)).done.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        flying, host = [], []
        began = time.perf_counter()
        events[0].record(self.steps.stream)
        for step in range(steps):
            before = time.perf_counter()
            flying.append(self.steps.launch(self.decode_batch(batch, step)))
            host.append(time.perf_counter() - before)
            events[step + 1].record(self.steps.stream)
            if len(flying) == 2:
                flying.pop(0).done.synchronize()
        flying.pop().done.synchronize()
        wall = (time.perf_counter() - began) / steps * 1e3
        device = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))
        return device, wall, statistics.median(host) * 1e3


# Sections


def ceilings(config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    big = torch.empty(2 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    read = time_of(lambda: torch.sum(big.view(torch.int32), dtype=torch.int32))
    copy = time_of(lambda: big[: 1 << 30].copy_(big[1 << 30 :]))
    big.resize_(0)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = time_of(lambda: a @ b)
    yield {"read_TBs": (4 << 30) / read / 1e9, "copy_TBs": (4 << 30) / copy / 1e9, "matrix_TFLOPs": 2 * 8192**3 / product / 1e9}


def decode(config: ModelConfig, options: argparse.Namespace, **rig_options: bool) -> Iterator[Row]:
    batches = [int(word) for word in options.batches.split(",")]
    for context in sorted((int(word) for word in options.contexts.split(",")), reverse=True):
        rig = Rig(config, max(batches), context, max(batches), **rig_options)
        for batch in batches:
            yield decode_row(rig, batch, context, options.steps)
        del rig
        torch.cuda.empty_cache()


def decode_row(rig: Rig, batch: int, context: int, steps: int) -> Row:
    floor = decode_floor_ms(rig.config, batch, context)
    device, wall, host = rig.decode_times(batch, steps)
    return {
        "batch": batch, "context": context, "floor_ms": floor, "device_ms": device, "percent": 100 * floor / device,
        "step_ms": wall, "host_ms": host, "tok_s": batch / wall * 1e3,
    }  # fmt: skip


def deterministic(config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    rig = Rig(config, 256, 1024, 256, deterministic=True)
    for batch in (1, 8, 64, 256):
        yield decode_row(rig, batch, 1024, options.steps)
    del rig
    torch.cuda.empty_cache()


def prefill(config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    rig = Rig(config, 8, 8192, 4096)
    for tokens, context in ((512, 0), (2048, 0), (4096, 0), (2048, 6144)):
        batch = StepBatch(
            token_ids=np.random.default_rng(tokens).integers(0, config.vocab_size, tokens),
            slots=np.zeros(1, np.int64),
            starts=np.array([0, tokens]),
            contexts=np.array([context]),
            due=np.ones(1, np.bool_),
            outputs=np.zeros(1, np.int64),
        )
        for _ in range(2):
            rig.steps.launch(batch).done.synchronize()
        times, host = [], []
        for _ in range(5):
            before = time.perf_counter()
            launched = rig.steps.launch(batch)
            host.append(time.perf_counter() - before)
            launched.done.synchronize()
            times.append(time.perf_counter() - before)
        took, floor = statistics.median(times) * 1e3, prefill_floor_ms(config, tokens)
        row: Row = {
            "tokens": tokens,
            "context": context,
            "step_ms": took,
            "host_ms": statistics.median(host) * 1e3,
            "tok_s": tokens / took * 1e3,
        }
        yield row | ({"floor_ms": floor, "percent": 100 * floor / took} if context == 0 else {})
    del rig
    torch.cuda.empty_cache()


def chunks(config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    """What it costs to compute a prompt in eighths, as an instance does that hands it over (core/engine/handoff_chunks.py)."""
    rig = Rig(config, 8, 16_384, 4096)
    for tokens in (4096, 8192, 16_384):
        whole = prompt_ms(rig, tokens, 4096)
        for chunk in (max(512, tokens // 8), max(512, tokens // 4)):
            took = prompt_ms(rig, tokens, chunk)
            yield {
                "tokens": tokens,
                "chunk": chunk,
                "prompt_ms": took,
                "whole_ms": whole,
                "cost_percent": 100 * (took / whole - 1),
            }
    del rig
    torch.cuda.empty_cache()


def prompt_ms(rig: Rig, tokens: int, chunk: int, repeats: int = 5) -> float:
    """Milliseconds for a prompt in chunks of this size, two steps in flight; the median."""
    ids, times = np.random.default_rng(tokens).integers(0, rig.config.vocab_size, tokens), []
    for _ in range(repeats + 1):
        flying, began = [], time.perf_counter()
        for begin in range(0, tokens, chunk):
            some = ids[begin : begin + chunk]
            batch = StepBatch(
                token_ids=some,
                slots=np.zeros(1, np.int64),
                starts=np.array([0, len(some)]),
                contexts=np.array([begin]),
                due=np.array([begin + chunk >= tokens]),
                outputs=np.zeros(1, np.int64),
            )
            flying.append(rig.steps.launch(batch))
            if len(flying) == 2:
                flying.pop(0).done.synchronize()
        for launched in flying:
            launched.done.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])


def attention(config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    """Decode attention of all layers as one graph, and nothing else."""
    for context in (1024, 2048):
        rig = Rig(config, 256, context, 256)
        for batch in BATCHES:
            q = torch.randn(batch, config.q_size, dtype=torch.bfloat16, device="cuda")
            out = torch.empty_like(q)
            everyone = torch.arange(batch, dtype=torch.int32, device="cuda")
            positions = torch.full_like(everyone, context - 1)
            split = torch.tensor([split_tokens_for(batch * context, batch, config.kv_heads)], dtype=torch.int32, device="cuda")
            scratch = DecodeScratch(batch, config.heads, config.kv_heads, config.head_dim, "cuda")

            def all_layers(q=q, out=out, rig=rig, everyone=everyone, positions=positions, split=split, scratch=scratch) -> None:  # noqa: ANN001
                for layer in range(config.layers):
                    attend_decode(
                        q, rig.step.pool, layer, rig.step.tables, everyone, positions, everyone, split, scratch, out,
                        heads=config.heads, scale=config.attention_scale,
                    )  # fmt: skip

            took = time_of_graph(all_layers)
            moved = batch * context * kv_bytes_per_token(config)
            yield {"batch": batch, "context": context, "us_per_layer": 1e3 * took / config.layers, "TBs": moved / took / 1e9}
        del rig


def sampling(config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    """Choosing tokens alone, on peaked and on flat logits."""
    from baton.worker.cuda.adjustments import Adjustments
    from baton.worker.cuda.columns import SlotColumns
    from baton.worker.cuda.kernels.adjust import adjust, tally
    from baton.worker.cuda.kernels.argmax import argmax
    from baton.worker.cuda.kernels.logprobs import write_logprobs
    from baton.worker.cuda.kernels.sample import SampleScratch, sample

    kinds = {"greedy": (0.0, 0, 1.0), "temperature": (0.8, 0, 1.0), "top_p": (0.8, 0, 0.95), "top_k": (0.8, 20, 0.95)}
    for spread, name in ((4.0, "peaked"), (1.0, "flat")):
        for rows in (1, 8, 64, 256):
            logits = torch.randn(rows, config.vocab_size, device="cuda") * spread
            slots = torch.arange(rows, dtype=torch.int32, device="cuda")
            tokens, last = torch.zeros_like(slots), torch.zeros_like(slots)
            scratch = SampleScratch(rows, config.vocab_size, "cuda")
            row: Row = {"logits": name, "rows": rows}
            for kind, (temperature, top_k, top_p) in kinds.items():
                columns = SlotColumns(rows, config.vocab_size, "cuda").draws
                columns.temperature.fill_(temperature)
                columns.top_k.fill_(top_k)
                columns.top_p.fill_(top_p)
                columns.seed.copy_(torch.arange(rows))

                def choose(logits=logits, slots=slots, columns=columns, scratch=scratch, tokens=tokens, last=last) -> None:  # noqa: ANN001
                    argmax(logits, slots, scratch.argmax, tokens, last)
                    sample(logits, slots, slots, columns, scratch, tokens, last)

                row[f"{kind}_us"] = 1e3 * time_of_graph(choose)
            kept = Adjustments(SlotColumns(rows, config.vocab_size, "cuda").adjust, rows, rows)
            cases = {"untouched": (0, -1), "penalties": (3, -1), "penalties_20_logprobs": (3, 20)}
            for kind, (flags, top) in cases.items():
                kept.columns.kinds.fill_(flags)
                kept.columns.top_logprobs.fill_(top)

                def adjusted(logits=logits, slots=slots, kept=kept, scratch=scratch, tokens=tokens, last=last) -> None:  # noqa: ANN001
                    adjust(logits, kept.raw, slots, slots, last, kept.columns, kept.rows)
                    argmax(logits, slots, scratch.argmax, tokens, last, kept.rows.adjusted)
                    write_logprobs(
                        logits,
                        kept.raw,
                        kept.rows.adjusted,
                        slots,
                        tokens,
                        kept.columns.top_logprobs,
                        kept.scratch,
                        kept.logprob_words,
                    )
                    tally(slots, slots, tokens, kept.columns)

                row[f"greedy_{kind}_us"] = 1e3 * time_of_graph(adjusted)
            yield row


def kernels(config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    """Where the time of a step goes, from the profiler: microseconds by kernel, summed over the step."""
    from torch.profiler import ProfilerActivity, profile

    rig = Rig(config, 256, 1024, 2048)
    chunk = StepBatch(
        token_ids=np.random.default_rng(1).integers(0, config.vocab_size, 1024),
        slots=np.zeros(1, np.int64),
        starts=np.array([0, 1024]),
        contexts=np.zeros(1, np.int64),
        due=np.ones(1, np.bool_),
        outputs=np.zeros(1, np.int64),
    )
    for name, batch in [(f"decode {n}", rig.decode_batch(n, 1)) for n in (1, 8, 32, 64, 256)] + [("prefill 1024", chunk)]:
        rig.steps.launch(batch).done.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            rig.steps.launch(batch).done.synchronize()
        found = {event.key[:48]: (event.device_time_total, event.count) for event in seen.key_averages()}
        row: Row = {"step": name}
        for key, (total, count) in sorted(found.items(), key=lambda item: -item[1][0])[:14]:
            row[f"\n   {key}"] = f"{total:.0f} us = {count} x {total / count:.1f}"
        yield row


SECTIONS: dict[str, Callable[[ModelConfig, argparse.Namespace], Iterator[Row]]] = {
    "ceilings": ceilings,
    "decode": decode,
    "prefill": prefill,
    "chunks": chunks,
    "prompts": gpu_prompts.prompts,
    "attention": attention,
    "sampling": sampling,
    "deterministic": deterministic,
    "kernels": kernels,
    "offline": gpu_serving.offline,
    "server": gpu_serving.server,
    "host_tier": gpu_serving.host_tier,
    "handoff": gpu_serving.handoff,
    "peer": gpu_peer.peer,
    "8_bits": gpu_8_bits.eight_bits,
}

ALONE = ("prompts", "offline", "server", "host_tier", "handoff", "peer", "8_bits")


def time_of(work: Callable[[], object], repeats: int = 10) -> float:
    """Milliseconds, the median."""
    times = []
    for repeat in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if repeat >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def time_of_graph(work: Callable[[], None]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return time_of(graph.replay)


if __name__ == "__main__":
    main()
