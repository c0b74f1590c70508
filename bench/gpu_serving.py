"""Sections of bench/gpu.py that run the whole engine: servers over HTTP, LLM in this process, hand-offs, the host tier.

server     seconds until it is ready, with all its graphs; a decode step as streaming clients see it (time per token while all
           of them decode) and the CPU time that each process spends per step; output tokens per second of 64 clients
offline    the same in this process, without HTTP; and 1000 tokens in, 1000 out
handoff    1k tokens from pool to pool: the copy alone, by another process, and a whole trip through `baton up`
host_tier  the first token of a prompt of 2k tokens: computed, and found in the host tier
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from baton.models.config import ModelConfig
from measuring.client import Stream, request_bytes, stream_all
from measuring.served import Server, served
from measuring.work import prompt

Row = dict[str, object]
BATCHES = (1, 8, 64, 256)
CONTEXT, OUTPUT = 1024, 128
CLIENTS = 64
TOKEN = b'"token_ids":['


def text_folder(scratch: Path, vocabulary: int) -> Path:
    """What a server of random weights still needs: a config, and a tokenizer in which every token is a word."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "chaos"))  # It knows how to make a small model.
    from chaos_model import make_model
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = make_model(scratch / "model")
    backend = Tokenizer(models.BPE({f"w{number}": number for number in range(vocabulary)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("w0", "w1")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "w0", "eos_token": "w1"}))
    return folder


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": "cuda", "load_format": "dummy", "model_shape": options.shape, "max_num_seqs": 256,
        "max_num_batched_tokens": 8192, "prefill_tokens_beside_decodes": 2048, "decode_gap_ms": 0,
        "kv_blocks": 24_576, "max_model_len": 8192, "served_model_name": "it",
        "quantization": options.quantization, "kv_cache_dtype": options.kv_dtype,
    }  # fmt: skip


# One server


def server(config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        folder, began = text_folder(Path(scratch), config.vocab_size), time.perf_counter()
        with served(Path(scratch), arguments=[str(folder)], **settings_of(options)) as one:
            yield {"ready_after_s": time.perf_counter() - began}
            decode_times(one, 8, "warm")
            for batch in BATCHES:
                yield {"batch": batch, "context": CONTEXT, **decode_times(one, batch, "steps")}
            for turn in range(2):
                yield {"clients": CLIENTS, "tok_s": http_rate(one, f"http {turn}")}


def decode_times(one: Server, batch: int, name: str) -> Row:
    """The median gap between tokens while all decode."""
    output = OUTPUT + batch // 2  # the first ones decode while the last ones are still prompts, two in a step
    length = CONTEXT - output // 2  # so it is the average context of what is timed
    bodies = [request_bytes(one.port, "it", prompt(length, name, batch, n), output, token_ids=True) for n in range(batch)]
    before = cpu_by_process(one)
    streams, _ = stream_all(one.port, bodies, batch)
    after = cpu_by_process(one)
    times = [token_times(stream) for stream in streams]
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    gaps = [late - early for each in times for early, late in pairwise(each) if begin <= early and late <= end]
    steps = sum(1 for at in times[0] if begin <= at <= end) - 1
    whole = 1e3 * (end - begin) / max(1, steps)
    spent = {f"{name}_cpu_ms": 1e3 * (after[name] - before.get(name, 0.0)) / output for name in after}
    return {"step_ms": whole, "median_ms": 1e3 * statistics.median(gaps), "tok_s": batch / whole * 1e3, **spent}


def token_times(stream: Stream) -> list[float]:
    """When each token came. Several in one packet came at one time."""
    times, rest = [], b""
    for now, data in stream.parts:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            at = line.find(TOKEN)
            if at >= 0 and line[at + len(TOKEN) : at + len(TOKEN) + 1] != b"]":
                times.append(now)
    return times


def cpu_by_process(one: Server) -> dict[str, float]:
    from measuring.machine import all_stats, tree

    found: dict[str, float] = {}
    stats = all_stats()
    for pid in tree([one.popen.pid], stats):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        module = words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words[:-1] else "?"
        found[module] = found.get(module, 0.0) + stats[pid].cpu_seconds
    return {name: seconds for name, seconds in found.items() if name in ("front", "engine", "worker")}


def http_prompts(name: str) -> list[list[int]]:
    return [prompt(CONTEXT, name, n) for n in range(2 * CLIENTS)]


def http_rate(one: Server, name: str) -> float:
    """Output tokens per second of twice as many requests as clients."""
    bodies = [request_bytes(one.port, "it", ids, 256) for ids in http_prompts(name)]
    _, seconds = stream_all(one.port, bodies, CLIENTS)
    return len(bodies) * 256 / seconds


# In this process


def offline(config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    from baton.llm import LLM, SamplingParams

    settings = settings_of(options)
    with tempfile.TemporaryDirectory() as scratch:
        folder, began = text_folder(Path(scratch), config.vocab_size), time.perf_counter()
        for name in ("prefill_tokens_beside_decodes", "decode_gap_ms"):
            settings.pop(name)
        llm = LLM(str(folder), **settings | {"kv_blocks": 36_000})
        yield {"load_s": time.perf_counter() - began}

        def rate(prompts: list[list[int]], output: int) -> float:
            begin = time.perf_counter()
            answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True))
            seconds = time.perf_counter() - begin
            tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
            if tokens != len(prompts) * output:
                print(f"{tokens} tokens where {len(prompts) * output} were asked for", file=sys.stderr)
            return tokens / seconds

        rate(http_prompts("warm")[:8], 16)
        for batch in BATCHES:
            prompts = [prompt(CONTEXT - OUTPUT // 2, "offline", batch, n) for n in range(batch)]
            dispatch = HostTimes(llm)
            begin = time.perf_counter()
            rate(prompts, OUTPUT)
            yield {"batch": batch, "seconds": time.perf_counter() - begin, **dispatch.row()}
        for name, length, times in (("16 tokens", 16, 1), ("2048 tokens", 2048, 1), ("2048 tokens, cached", 2048, 2)):
            yield {"prompt": name, **first_tokens(llm, length, times, rate)}
        # As many at once as there are clients: the queue is ours here, as it is the clients' there.
        for turn in range(2):
            yield {"clients": CLIENTS, "tok_s": in_turns(llm, http_prompts(f"offline {turn}"), rate)}
        count = options.requests
        yield {"requests": count, "in": 1000, "out": 1000, "tok_s": rate([prompt(1000, "1000", n) for n in range(count)], 1000)}
        llm._runner.close()
    torch.cuda.empty_cache()


def first_tokens(llm: Any, length: int, times: int, rate: Any) -> Row:
    """Of one prompt after another: what a first token takes, the last time that each is asked for."""
    dispatch = HostTimes(llm)
    found: dict[str, list[float]] = {}
    for n in range(8):
        for _ in range(times):
            for calls in dispatch.spent.values():
                calls.clear()
            begin = time.perf_counter()
            rate([prompt(length, "first", length, times, n)], 1)
            took = time.perf_counter() - begin
        for name, seconds in (("all", took), *((name, sum(calls)) for name, calls in dispatch.spent.items())):
            found.setdefault(f"{name}_ms", []).append(1e3 * seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def in_turns(llm: Any, prompts: list[list[int]], rate: Any) -> float:
    before = llm._instance_config
    llm._instance_config = _with_slots(before, CLIENTS)
    llm._begin()
    found = rate(prompts, 256)
    llm._instance_config = before
    llm._begin()
    return float(found)


def _with_slots(config: Any, slots: int) -> Any:
    from dataclasses import replace

    return replace(config, scheduler=replace(config.scheduler, slots=slots))


class HostTimes:
    """What the host does for a step, while it is done: planning, launching, and waiting for the device."""

    def __init__(self, llm: Any) -> None:
        self.spent: dict[str, list[float]] = {}
        self.gaps: list[float] = []
        runner = llm._runner
        for name, owner in (("submit", runner), ("finish", runner), ("_dispatch", llm), ("launch", runner.executor)):
            self._time(owner, name)
        self._time(runner.executor, "collect", "wait")

    def _time(self, owner: Any, name: str, label: str = "") -> None:
        inner = getattr(type(owner), name).__get__(owner)
        spent = self.spent.setdefault(label or name.strip("_"), [])

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                spent.append(time.perf_counter() - begin)
                if label == "" and name == "finish":
                    self.gaps.append(time.perf_counter())

        setattr(owner, name, timed)

    def row(self) -> Row:
        steps = [1e3 * (late - early) for early, late in pairwise(self.gaps)]
        last = steps[-OUTPUT + 8 :]
        medians = {f"{name}_ms": 1e3 * statistics.median(times[-OUTPUT + 8 :]) for name, times in self.spent.items() if times}
        return {"step_ms": statistics.fmean(last), "median_ms": statistics.median(last), **medians}


# Copies


CHILD = """
import json, statistics, sys, time
from baton.kvpool.copies import CopySpan, copy_runs
from baton.kvpool.device_pool import DevicePool
from baton.protocol.codec import decode
theirs = DevicePool.attach(int(sys.argv[2]), decode(bytes.fromhex(sys.argv[1])), read_only=True)
ours = DevicePool.create(theirs.layout, theirs.blocks)
found = {}
for name, runs in (("one_run", [CopySpan(0, 0, 64)]), ("block_by_block", [CopySpan(2 * n, 2 * n, 1) for n in range(64)])):
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        copy_runs(theirs, ours, runs, lambda: True)
        times.append(time.perf_counter() - begin)
    found[f"{name}_ms"] = 1e3 * statistics.median(times)
print(json.dumps(found))
ours.close()
theirs.close()
"""


def handoff(config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    from baton.kvpool.device_pool import DevicePool
    from baton.kvpool.layout import KVLayout
    from baton.protocol.codec import encode

    layout = KVLayout(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        dtype="bfloat16",
        format="token-major",
    )
    pool = DevicePool.create(layout, 128)
    command = [sys.executable, "-c", CHILD, encode(pool.announcement()).hex(), str(pool.fd)]
    copied = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True, pass_fds=(pool.fd,)).stdout
    pool.close()
    yield {"tokens": 1024, "MiB": 64 * layout.block_bytes / 2**20, **json.loads(copied)}
    settings = settings_of(options) | {"kv_blocks": 4096, "max_num_seqs": 8, "handoff_tokens_min": 0}
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [
            str(text_folder(Path(scratch), config.vocab_size)),
            "--prefill=1",
            "--decode=1",
            "--handoff=always",
            "--plain",
        ]
        with served(Path(scratch), "up", arguments=arguments, **settings) as one:
            for n in range(12):
                asked = {"prompt": prompt(1024, "routed", n), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
                one.post("/v1/completions", asked)
            count, total = (one.metric(f"baton:router_handoff_seconds_{what}") for what in ("count", "sum"))
            yield {"routed_requests": count, "mean_ms": 1e3 * total / max(count, 1.0)}


def host_tier(config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    settings = settings_of(options) | {"kv_host_gib": 6, "max_num_seqs": 64, "kv_blocks": 4096}
    with tempfile.TemporaryDirectory() as scratch:
        folder = text_folder(Path(scratch), config.vocab_size)
        with served(Path(scratch), arguments=[str(folder)], **settings) as one:
            times: dict[str, list[float]] = {"none": [], "device": [], "host": []}
            for n in range(10):
                ids = prompt(2048, "host", n)
                for tier in times:
                    if tier == "host":
                        settle(one, "device_to_host")
                        one.post("/v1/cache/clear", {"tiers": ["device"]})
                    seconds, cached = first_token(one, ids)
                    if tier == "none" or cached.get(tier, 0) >= len(ids) - 32:
                        times[tier].append(seconds)
            medians = {tier: 1e3 * statistics.median(found[1:] or [0.0]) for tier, found in times.items()}
            computed, host = medians["none"], medians["host"]
            hits = len(times["host"])
            yield {
                "computed_ms": computed,
                "device_ms": medians["device"],
                "host_ms": host,
                "hits": hits,
                "share": host / computed,
            }


def first_token(one: Server, ids: list[int]) -> tuple[float, dict[str, int]]:
    """Seconds, and how many tokens each tier had."""
    begun = time.perf_counter()
    answer = one.post("/v1/completions", {"prompt": ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True})
    seconds = time.perf_counter() - begun
    details = answer["usage"]["prompt_tokens_details"]
    return seconds, details.get("cached_tokens_by_tier", {"device": details["cached_tokens"]})


def settle(one: Server, way: str) -> None:
    """Until copies have come to rest: nothing was moved for a second, for the server counts anew twice a second."""
    before, same = -1.0, 0
    while same < 2:
        time.sleep(0.5)
        now = one.metric(f'baton:kv_blocks_moved_total{{way="{way}"}}')
        before, same = now, same + 1 if now == before else 0
