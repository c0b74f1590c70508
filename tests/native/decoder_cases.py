"""Whole models of every trait with random weights, and sequences of tokens to run through them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from kernels import small_config
from steps import Paged, Part

from baton.config import WorkerConfig
from baton.kvpool.pool import KVPool
from baton.models.config import (
    Experts,
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    Traits,
    YarnScaling,
)
from baton.models.loaders.dummy import DummyWeights
from baton.models.open import OpenedModel
from baton.models.raw_tensor import Floats
from baton.native.library import Library
from baton.worker.flat_batch import FlatBatch
from baton.worker.forward.base import Forward, LoadedForward
from baton.worker.forward.native_forward import load_native
from baton.worker.forward.torch_forward import load_torch
from baton.worker.kv_layout import kv_layout

BLOCK_SIZE = 16
PLAIN = small_config(layers=2, vocab_size=97, hidden_size=64, heads=6, kv_heads=2, head_dim=16, intermediate_size=96)


def rope(scaling: object) -> RopeConfig:
    return RopeConfig(theta=10000.0, scaling=scaling)  # type: ignore[arg-type]


SOFTMAX = Experts(count=5, per_token=2, inner_size=24, normalised=True)
SIGMOID = Experts(
    count=7, per_token=3, inner_size=40, normalised=False, layers=(False, True), scoring="sigmoid", correction=True, scale=1.5,
    shared_size=56, shared_gate=True,
)  # fmt: skip
"""With everything that a mixture may have."""

EXACT_CASES: dict[str, ModelConfig] = {
    "plain": PLAIN,
    "tied": replace(PLAIN, tied_embeddings=True),
    "biases": replace(PLAIN, traits=Traits(qkv_bias=True, output_bias=True, mlp_bias=True)),
    "norms of heads": replace(PLAIN, traits=Traits(qk_norm=True)),
    "windows": replace(PLAIN, traits=Traits(layer_windows=(5, None))),
    "everything": replace(PLAIN, traits=Traits(qkv_bias=True, mlp_bias=True, qk_norm=True, layer_windows=(None, 20))),
    "odd sizes": replace(PLAIN, hidden_size=48, head_dim=10, intermediate_size=50, vocab_size=33),
    "tiny": replace(PLAIN, hidden_size=2, head_dim=2, heads=1, kv_heads=1, intermediate_size=1, vocab_size=3),
    "one kv head": replace(PLAIN, kv_heads=1, head_dim=6),
    "as many kv heads as heads": replace(PLAIN, kv_heads=6),
    "wide heads": replace(PLAIN, heads=2, kv_heads=1, head_dim=128),
    "linear": replace(PLAIN, rope=rope(LinearScaling(factor=3.0))),
    "llama3": replace(
        PLAIN, rope=rope(Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32))
    ),
    "yarn": replace(PLAIN, rope=rope(YarnScaling(factor=4.0, original_context=16, attention_factor=1.2))),
    "experts": replace(PLAIN, experts=SOFTMAX),
    "experts with everything": replace(PLAIN, experts=SIGMOID, traits=Traits(norms="both")),
    "experts side by side with attention": replace(PLAIN, experts=SOFTMAX, traits=Traits(parallel=True)),
    "one of one expert": replace(PLAIN, experts=replace(SOFTMAX, count=1, per_token=1)),
    "divisors": replace(PLAIN, rope=rope(FrequencyDivisors(divisors=tuple(1.0 + i for i in range(8))))),
}
QUANTISED_CASES: dict[str, ModelConfig] = {
    "plain": PLAIN,
    "tied": EXACT_CASES["tied"],
    "everything": EXACT_CASES["everything"],
    "experts": replace(PLAIN, experts=replace(SOFTMAX, inner_size=64)),
    "experts with everything": replace(PLAIN, experts=replace(SIGMOID, inner_size=96, shared_size=32)),
    "some rows that are no whole groups": replace(PLAIN, hidden_size=48, head_dim=32, intermediate_size=64),
}


def load(library: Library | None, config: ModelConfig, *, threads: int = 1, **settings: object) -> LoadedForward:
    """In C, or in torch where no library is given. `settings`: WorkerConfig's."""
    opened = OpenedModel(Path(), config, DummyWeights(config, 5))
    worker = WorkerConfig(threads=threads, **settings)  # type: ignore[arg-type]
    return load_native(library, opened, worker) if library else load_torch(opened, worker)


@dataclass
class Result:
    """Of every token of a sequence."""

    hidden: Floats
    logits: Floats


class Conversation(Paged):
    """Sequences of random tokens."""

    def __init__(self, config: ModelConfig, lengths: list[int], seed: int = 0) -> None:
        super().__init__(lengths, BLOCK_SIZE, seed)
        rng = np.random.default_rng(seed)
        self.config = config
        self.tokens = [rng.integers(0, config.vocab_size, n, np.int32) for n in lengths]

    def forward(self, loaded: LoadedForward) -> Forward:
        """On a pool of its own, full of junk."""
        layout = kv_layout(self.config, BLOCK_SIZE, loaded.kv)
        self._pool = KVPool.create(layout, self.blocks)  # the forward pass knows its address only
        self._pool.data.view(np.uint8).fill(0xFF)
        return loaded.with_pool(self._pool)

    def flat(self, parts: list[Part]) -> FlatBatch:
        token_ids = np.concatenate([self.tokens[s][at : at + n] for s, at, n in parts])
        positions = np.concatenate([np.arange(at, at + n) for _, at, n in parts])
        due = np.array([at + n == self.lengths[s] for s, at, n in parts])
        return FlatBatch(self.spans(parts), token_ids, positions, due)

    def run(self, forward: Forward, steps: list[list[Part]]) -> list[Result]:
        """Step by step; the logits of all rows, worked out by the step as well."""
        results = [Result(*(np.full((n, w), np.nan, np.float32) for w in self._widths)) for n in self.lengths]
        for parts in steps:
            flat = self.flat(parts)
            hidden = forward.hidden(flat)
            logits = forward.logits(hidden)
            for (sequence, at, n), start in zip(parts, flat.spans.starts.tolist(), strict=False):
                results[sequence].hidden[at : at + n] = hidden[start : start + n]
                results[sequence].logits[at : at + n] = logits[start : start + n]
        return results

    @property
    def _widths(self) -> tuple[int, int]:
        return self.config.hidden_size, self.config.vocab_size


def same_bits(some: list[Result], others: list[Result]) -> bool:
    return all(
        np.array_equal(a.hidden, b.hidden) and np.array_equal(a.logits, b.logits) for a, b in zip(some, others, strict=True)
    )
