"""A platform in numpy: a third device beside `cpu` and `cuda`, as an author with other hardware would begin.

    pip install ./examples/numpy_platform
    baton serve --device numpy
    pytest examples/numpy_platform              # the conformance suite

A platform answers five questions (baton/worker/platforms/base.py): what the KV pool holds, how weights become an executor, how
much memory there is, how a pool is made, and how large steps should be. Scheduling, paging, preemption, sampling, grammars, the
cache tiers and recovery are not its business. Here the executor is `stepwise`, which samples on the host and asks for a forward
pass only; hardware that runs ahead of the host implements `Executor` itself (baton/worker/executors/base.py).

It computes dense decoders in float32, a sequence at a time, and refuses the rest by name. It is right and slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from baton.config import WorkerConfig
from baton.config.device_defaults import CPU, StepDefaults
from baton.errors import InvalidConfig, ModelUnsupported
from baton.kvpool.layout import KVKind, KVLayout
from baton.kvpool.memory import MemoryFacts, main_memory, transient_bytes
from baton.kvpool.pool import KVPool
from baton.models.config import ModelConfig, Traits
from baton.models.dequantise import dequantise
from baton.models.loaders.weights import Progress, RawWeights
from baton.models.open import OpenedModel
from baton.models.parameters import EMBED, LM_HEAD, expected_shapes
from baton.models.rotary import rotary_angles, rotary_frequencies
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PoolReady
from baton.protocol.progress import ProgressWord
from baton.worker.arrays import Floats, Int64s
from baton.worker.draws import Draws, choose, likeliest
from baton.worker.executors.base import LoadedExecutor
from baton.worker.executors.stepwise import stepwise
from baton.worker.flat_batch import FlatBatch
from baton.worker.forward.base import LoadedForward
from baton.worker.token_masks import Masks

KIND = KVKind("float32", "turned")
ARITHMETIC = 1
"""Raise it whenever the bits of a result change: stored KV blocks of another number are then not used."""


def open_numpy(config: WorkerConfig, path: Path) -> tuple[NumpyPlatform, WorkerConfig]:
    """What the entry point names. Settings that can never work are refused here, before any weights are read."""
    if config.dtype == "bfloat16" or config.kv_dtype not in ("auto", "float32") or config.quantization not in ("auto", "none"):
        raise InvalidConfig("--device numpy computes in float32: leave out --dtype, --kv-cache-dtype and --quantization")
    return NumpyPlatform(), replace(
        config, device="numpy", dtype="float32", quantization="none", kv_memory_gib=config.kv_memory_gib or 0.5
    )


class NumpyPlatform:
    name = "numpy"
    shares_pools = True  # they are shared memory, so tiers and hand-offs work

    def step_defaults(self, sharers: int) -> StepDefaults:
        return CPU

    def kv_kind(self, model: ModelConfig, settings: WorkerConfig) -> KVKind:
        return KIND

    def load(self, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None = None) -> LoadedExecutor:
        model = opened.config
        computed = Traits(
            qkv_bias=model.traits.qkv_bias, qk_norm=model.traits.qk_norm, layer_windows=model.traits.layer_windows
        )
        if model.experts is not None or model.traits != computed:
            raise ModelUnsupported(f"--device numpy computes dense decoders like Llama and Qwen3, not {model.architecture}")
        taken = RawWeights(opened.weights, model, progress)
        weights = {name: dequantise(taken.take(name)) for name in expected_shapes(model)}
        return stepwise(LoadedForward(KIND, lambda pool: NumpyForward(model, weights, pool)))

    def memory(self) -> MemoryFacts:
        return main_memory()

    def memory_of_step(self, run: Callable[[], object]) -> int:
        return transient_bytes(run)

    def create_pool(self, layout: KVLayout, blocks: int, incarnation: PoolIncarnation | None = None) -> KVPool:
        return KVPool.create(layout, blocks, incarnation=incarnation)

    def attach_pool(self, fd: int, announced: PoolReady) -> KVPool:
        return KVPool.attach(fd, announced)


class NumpyForward:
    name = "numpy"
    arithmetic = f"numpy {ARITHMETIC} {np.__version__}"

    def __init__(self, config: ModelConfig, weights: dict[str, Floats], pool: KVPool) -> None:
        self.config, self._weights, self._pool = config, weights, pool
        self.final_norm = weights["final_norm.weight"], None
        self._frequencies, self._factor = rotary_frequencies(config.rope, config.head_dim)
        self._head = weights.get(LM_HEAD, weights[EMBED])
        self._layer_done: Callable[[], None] = lambda: None

    def hidden(self, flat: FlatBatch) -> Floats:
        hidden = self._weights[EMBED][flat.token_ids]
        cos, sin = (part[:, None] for part in rotary_angles(self._frequencies, self._factor, flat.positions))
        for layer in range(self.config.layers):
            hidden = hidden + self._attention(layer, hidden, flat, cos, sin)
            hidden = hidden + self._mlp(f"layers.{layer}.mlp", hidden)
            self._layer_done()
        return hidden

    def logits(self, hidden: Floats) -> Floats:
        return self._normed(hidden, "final_norm.weight") @ self._head.T

    def likeliest(self, hidden: Floats, masks: Masks | None = None) -> Int64s:
        return likeliest(self.logits(hidden), masks)

    def choose(self, logits: Floats, draws: Draws, masks: Masks | None = None) -> Int64s:
        return choose(logits, draws, masks)

    def report_progress(self, word: ProgressWord) -> None:
        self._layer_done = word.advance

    def close(self) -> None:
        del self._pool  # the runner closes it

    # One layer

    def _normed(self, rows: Floats, weight: str) -> Floats:
        scale = np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + np.float32(self.config.norm_eps))
        return rows / scale * self._weights[weight]

    def _linear(self, name: str, rows: Floats) -> Floats:
        out = rows @ self._weights[f"{name}.weight"].T
        bias = self._weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _mlp(self, name: str, hidden: Floats) -> Floats:
        rows = self._normed(hidden, f"{name}_norm.weight")
        gate = self._linear(f"{name}.gate", rows)
        with np.errstate(over="ignore"):  # exp of a large number is infinity, and the quotient zero
            return self._linear(f"{name}.down", gate / (1 + np.exp(-gate)) * self._linear(f"{name}.up", rows))

    def _attention(self, layer: int, hidden: Floats, flat: FlatBatch, cos: Floats, sin: Floats) -> Floats:
        name, config = f"layers.{layer}.attention", self.config
        rows = self._normed(hidden, f"{name}_norm.weight")
        q, k, v = (self._linear(f"{name}.{part}", rows).reshape(len(rows), -1, config.head_dim) for part in "qkv")
        if config.traits.qk_norm:
            q, k = self._normed(q, f"{name}.q_norm.weight"), self._normed(k, f"{name}.k_norm.weight")
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        out = np.empty((len(rows), config.q_size), np.float32)
        spans = flat.spans
        for place, (slot, context) in enumerate(zip(spans.slots.tolist(), spans.contexts.tolist(), strict=True)):
            begin, end = spans.starts[place : place + 2].tolist()
            self._store(layer, k[begin:end], v[begin:end], context, spans.tables[slot])
            out[begin:end] = self._attend(layer, q[begin:end], context, spans.tables[slot])
        return self._linear(f"{name}.o", out)

    def _store(self, layer: int, k: Floats, v: Floats, context: int, table: Int64s) -> None:
        size, positions = self._pool.layout.block_size, np.arange(context, context + len(k))
        blocks, places = table[positions // size], positions % size
        self._pool.keys[blocks, layer, :, :, places] = k
        self._pool.values[blocks, layer, :, places] = v

    def _attend(self, layer: int, q: Floats, context: int, table: Int64s) -> Floats:
        """Only tokens that were computed are read: the rest of a block may hold anything."""
        config, total = self.config, context + len(q)
        blocks = table[: -(-total // self._pool.layout.block_size)]
        keys = np.concatenate(list(self._pool.keys[blocks, layer]), axis=-1)[:, :, :total]  # [kv_head, head_dim, token]
        values = np.concatenate(list(self._pool.values[blocks, layer]), axis=1)[:, :total]  # [kv_head, token, head_dim]
        queries = q.reshape(len(q), config.kv_heads, -1, config.head_dim).transpose(1, 2, 0, 3)
        scores = queries @ keys[:, None] * np.float32(config.attention_scale)  # [kv_head, head of its group, row, token]
        seen, at = np.arange(total), np.arange(context, total)[:, None]
        hidden, window = seen > at, config.window(layer)
        scores[..., hidden if window is None else hidden | (seen <= at - window)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out = (shares / shares.sum(-1, keepdims=True)) @ values[:, None]
        return out.transpose(2, 0, 1, 3).reshape(len(q), -1)


def rotated(heads: Floats, cos: Floats, sin: Floats) -> Floats:
    """Dimension i and dimension i + head_dim / 2 turn together."""
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
