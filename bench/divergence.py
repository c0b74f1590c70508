"""How far the next token's distribution is from the exact model's: weights, keys and values, variants of the kernels.

    python bench/divergence.py [--model smollm2] [--ways auto,int8] [--kv-cache-dtypes int8,float32] [--variants avx512,avx2]
                               [--windows 16] [--window 512]

Exact is `none` with float32 keys and values: the numbers of the file. The text is that of bench/quality.py, a window at a time.

KL      of the exact distribution from the one found, thousandths of a nat, mean of all tokens; ± is its standard error
argmax  share of tokens whose likeliest successor is the exact model's
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from baton.config import WorkerConfig
from baton.kvpool.pool import KVPool
from baton.models.names import resolve
from baton.models.open import OpenedModel, open_model
from baton.models.raw_tensor import Floats
from baton.native.library import load_variant
from baton.native.variants import Variant, supported_variants
from baton.text.loading import load_model_text
from baton.worker.flat_batch import FlatBatch, Spans
from baton.worker.forward.native_forward import load_native
from baton.worker.kv_layout import kv_layout
from measuring.goals import markdown
from measuring.machine import CORES
from measuring.work import Prompt
from quality import windows_of

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Way:
    """How a model is computed."""

    quantization: str
    kv_dtype: str
    variant: Variant


@dataclass(slots=True)
class Divergence:
    """From the exact model, over all tokens so far."""

    kl: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)

    def add(self, exact: Floats, found: Floats) -> None:
        """Logarithms of probabilities: [tokens, vocabulary]."""
        self.kl += (np.exp(exact) * (exact - found)).sum(-1, dtype=np.float64).tolist()
        self.same += (exact.argmax(-1) == found.argmax(-1)).astype(float).tolist()

    def cells(self) -> list[str]:
        error = stdev(self.kl) / sqrt(len(self.kl))
        return [f"{1000 * fmean(self.kl):.2f} ± {1000 * error:.2f}", f"{100 * fmean(self.same):.1f} %"]


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return shifted


def logprobs(opened: OpenedModel, way: Way, windows: Sequence[Prompt], threads: int) -> Iterator[Floats]:
    """[tokens, vocabulary] of each window."""
    config = WorkerConfig(quantization=way.quantization, kv_dtype=way.kv_dtype, threads=threads, block_size=BLOCK)
    loaded = load_native(load_variant(way.variant), opened, config)
    blocks = -(-max(map(len, windows)) // BLOCK)
    pool = KVPool.create(kv_layout(opened.config, BLOCK, loaded.kv), blocks)
    table = np.arange(blocks, dtype=np.int32).reshape(1, -1)
    forward = loaded.with_pool(pool)
    for window in windows:
        starts, zero = np.array([0, len(window)], np.int64), np.zeros(1, np.int64)
        spans = Spans(table, zero, starts, zero)
        hidden = forward.hidden(FlatBatch(spans, np.array(window, np.int32), np.arange(len(window)), np.ones(1, bool)))
        yield log_softmax(np.concatenate([forward.logits(hidden[at : at + 64]).copy() for at in range(0, len(window), 64)]))
    forward.close()
    pool.close()


def measure(path: Path, ways: Sequence[Way], windows: Sequence[Prompt], threads: int) -> dict[Way, Divergence]:
    opened = open_model(path)
    exact = logprobs(opened, Way("none", "float32", supported_variants()[0]), windows, threads)
    every = [logprobs(open_model(path), way, windows, threads) for way in ways]
    found = {way: Divergence() for way in ways}
    for right, *others in zip(exact, *every, strict=True):  # window by window: logits of all of them would be gigabytes
        for way, other in zip(ways, others, strict=True):
            found[way].add(right, other)
    return found


def main() -> None:
    options = read_options()
    path = resolve(options.model)
    windows = windows_of(load_model_text(str(path)).tokenizer.encode, options.window, options.windows)
    known = {variant.name: variant for variant in supported_variants()}
    ways = [
        Way(quantization, kv, known[name])
        for name in options.variants.split(",")
        for quantization in options.ways.split(",")
        for kv in options.kv_cache_dtypes.split(",")
    ]
    found = measure(path, ways, windows, options.threads)
    rows = [[way.variant.name, way.quantization, way.kv_dtype, *each.cells()] for way, each in found.items()]
    print(f"{len(windows)} windows of {options.window} tokens\n")
    print(markdown(["variant", "weights", "keys and values", "KL", "argmax"], rows))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for baton serve")
    parser.add_argument("--ways", default="auto,int8", help="of quantization, comma separated")
    parser.add_argument("--kv-cache-dtypes", default="int8,float32", help="comma separated")
    parser.add_argument("--variants", default=supported_variants()[0].name, help="of the kernels, comma separated")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--threads", type=int, default=CORES)
    return parser.parse_args()


if __name__ == "__main__":
    main()
